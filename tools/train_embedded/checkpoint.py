"""Reading and writing the trained model as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.train_embedded.documents import END_OF_TEXT, IM_END
from tools.train_embedded.model import TrainedModel
from tools.train_embedded.tokenizer import write_tokenizer

__all__ = ["load_folder", "write_folder"]


def write_folder(model: TrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """bf16 weights with transformers' names, the config, the generation config and the tokeniser."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    end, pad = tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)
    ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    _write_json(folder / "config.json", dict(model.config) | ids)
    _write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad})
    write_tokenizer(tokenizer, folder, model.config["max_position_embeddings"])


def load_folder(folder: Path) -> tuple[TrainedModel, Tokenizer]:
    """The model in fp32 with the folder's (bf16) weights, and its tokeniser."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = TrainedModel(config)
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
