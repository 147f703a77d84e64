"""What the shipped checkpoint was trained with: architecture, curriculum, loss weights and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.train_embedded.batches import Stage
from tools.train_embedded.documents import Kind

__all__ = ["CONTEXT_SHARE", "CURRICULUM", "KIND_WEIGHTS", "MTP_FROM", "MTP_WEIGHT", "STEPS", "Schedule", "architecture"]

STEPS = 6500

# Documents grow in stages. Batches hold the same number of tokens at every length. Facts of one kind stand together from
# the start: while a question can be answered by the only word of the right kind, nothing learns which fact it asks about.
# First all kinds, until what stands after its key is found, and also "Is the red door open or locked?", which offers a wrong
# word nearer than the right one. An answer that stands before its key ("Ann likes figs." "Who likes figs?") is found late, and
# only where many ask for it. Where those stages come earlier, nothing else is learned beside them.
CURRICULUM = (
    Stage(250, (64,), (1.0,), focus=0.4),
    Stage(800, (64, 128, 512), (0.25, 0.6, 0.15), focus=0.6),
    Stage(1200, (64, 128, 512, 2048), (0.1, 0.4, 0.42, 0.08), focus=0.5),
    Stage(2466, (64, 128, 512, 2048), (0.05, 0.3, 0.47, 0.18), focus=0.4),
    Stage(3012, (64, 128, 512, 2048), (0.05, 0.3, 0.47, 0.18), focus=0.4, prefer_people=True),
    Stage(3800, (64, 128, 512), (0.3, 0.5, 0.2), focus=0.85, people=0.75, prefer_people=True),
    Stage(4600, (64, 128, 512, 2048), (0.1, 0.4, 0.42, 0.08), focus=0.6, people=0.6, prefer_people=True),
    Stage(STEPS, (64, 128, 512, 2048), (0.05, 0.3, 0.47, 0.18), focus=0.4, people=0.5, prefer_people=True),
)

# The loss sees this share of the user's words, drawn per batch: predicting all of them costs much and teaches little.
CONTEXT_SHARE = 0.25

# The step from which the multi-token-prediction layer trains too: its cost is a quarter of a step.
MTP_FROM = 1350
MTP_WEIGHT = 0.3

# What the user says is mostly chance; what must be looked up decides the model's worth.
KIND_WEIGHTS = {
    Kind.PAD: 0.0,
    Kind.CONTEXT: 0.05 / CONTEXT_SHARE,
    Kind.ANSWER: 0.4,
    Kind.RECALL: 6.0,
    Kind.COPY: 4.0,
    Kind.SUM: 4.0,
    Kind.PROSE: 0.3,
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up, constant, then linear decay to a twentieth over the last `decay` share of the steps.

    Until the decay begins, nothing depends on `steps`: a run can be ended sooner or later than planned from its state.
    """

    steps: int
    warmup_steps: int = 50
    decay: float = 0.66

    def factor(self, step: int) -> float:
        """Multiplier of the learning rate at `step`."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return warm * max(0.05, min(1.0, left))


def architecture(vocab_size: int) -> dict[str, Any]:
    """The config.json of the checkpoint (without token ids)."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": vocab_size,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "hidden_act": "silu",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "attn_output_gate": True,
        "attention_bias": False,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,
        "dtype": "bfloat16",
    }
