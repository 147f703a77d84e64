"""What a checkpoint folder can have wrong, and that each is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.config import ModelSource
from tandem.errors import CheckpointError, ConfigError
from tandem.model.checkpoint import Checkpoint, locate
from tandem.model.load import load_model
from tests.model.variants import BASE, VARIANTS, Variant, make, rewrite, tensors_of

MakeVariant = Callable[[str], Variant]
Q_PROJ = "model.layers.3.self_attn.q_proj.weight"


@pytest.fixture
def whole(variant: MakeVariant) -> Path:
    return variant("equal heads").folder


def test_a_missing_tensor_is_named(whole: Path, tmp_path: Path) -> None:
    tensors = tensors_of(whole)
    del tensors[Q_PROJ]
    with pytest.raises(CheckpointError, match=f"missing tensor {Q_PROJ}"):
        Checkpoint.open(rewrite(whole, tmp_path / "c", tensors))


def test_a_missing_head_is_missing_only_when_untied(whole: Path, tmp_path: Path) -> None:
    tensors = tensors_of(whole)
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"missing tensor lm_head\.weight"):
        Checkpoint.open(rewrite(whole, tmp_path / "untied", tensors))
    config = json.loads((whole / "config.json").read_text()) | {"tie_word_embeddings": True}
    Checkpoint.open(rewrite(whole, tmp_path / "tied", tensors, config))


def test_unexpected_tensors_are_named_and_counted(whole: Path, tmp_path: Path) -> None:
    extra = {f"model.layers.0.odd{i}": torch.zeros(1) for i in range(5)} | {"stray": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"unexpected tensors model\.layers\.0\.odd0, .* and 3 more"):
        Checkpoint.open(rewrite(whole, tmp_path / "c", tensors_of(whole) | extra))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(whole: Path, tmp_path: Path) -> None:
    tensors = tensors_of(whole) | {Q_PROJ: torch.zeros(3, 64)}
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ} has shape \[3, 64\], the config says \[256, 64\]"):
        Checkpoint.open(rewrite(whole, tmp_path / "c", tensors))


def test_a_weight_of_an_unsupported_type_is_refused(whole: Path, tmp_path: Path) -> None:
    tensors = tensors_of(whole)
    folder = rewrite(whole, tmp_path / "c", tensors | {Q_PROJ: tensors[Q_PROJ].to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        load_model(ModelSource(path=str(folder)))


@pytest.mark.parametrize("keep_bytes", [0, 5, 100, 20_000])
def test_a_truncated_file_is_named(keep_bytes: int, whole: Path, tmp_path: Path) -> None:
    folder = rewrite(whole, tmp_path / "c", tensors_of(whole))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors .*(truncated|corrupt)"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "header",
    [
        "nonsense",
        "[]",
        '{"a": 1}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [8, 4]}}',
        '{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
    ],
)
def test_a_corrupt_header_is_refused(header: str, whole: Path, tmp_path: Path) -> None:
    folder = rewrite(whole, tmp_path / "c", {"a": torch.zeros(1)})
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    with pytest.raises(CheckpointError, match="corrupt"):
        Checkpoint.open(folder)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"model_type": "qwen3_5_text"}))
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Checkpoint.open(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make(tmp_path / "sharded", VARIANTS["only attention"], max_shard_size="100KB").folder


def test_a_shard_that_the_index_names_must_exist(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        Checkpoint.open(sharded)


def test_an_index_that_disagrees_with_its_shards_is_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    first, last = (sorted(sharded.glob("model-*.safetensors"))[i].name for i in (0, -1))
    for name, file in data["weight_map"].items():
        if file == first:
            data["weight_map"][name] = last
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=f"{last} lacks the tensor"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 3}}'])
def test_a_malformed_index_is_refused(content: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint.open(sharded)


def test_a_path_that_is_neither_folder_nor_hub_id_is_refused() -> None:
    for path in ("/no/such/folder", "just-a-name", "a/b/c", "./x", "../x"):
        with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
            locate(path)


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_args: object, **_kwargs: object) -> str:
        raise OSError("no route to host\nwith details")

    monkeypatch.setattr("tandem.model.checkpoint.snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match=r"owner/name .* could not be fetched from the hub: no route to host$"):
        locate("owner/name")


def test_a_hub_id_is_downloaded_and_keeps_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tandem.model.checkpoint.snapshot_download", lambda repo, allow_patterns: str(tmp_path))
    assert locate("owner/name") == (tmp_path, "owner/name")


def test_progress_rises_to_the_total(whole: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(ModelSource(path=str(whole)), progress=lambda done, total: calls.append((done, total)))
    done = [d for d, _ in calls]
    assert done == sorted(done)
    assert {t for _, t in calls} == {done[-1]} == {sum(t.nbytes for t in tensors_of(whole).values())}


def test_the_fingerprint_follows_content_dtype_and_architecture_alone(whole: Path, tmp_path: Path) -> None:
    def fingerprint(folder: Path, dtype: str = "auto") -> str:
        return load_model(ModelSource(path=str(folder), dtype=dtype)).fingerprint

    tensors = tensors_of(whole)
    original = fingerprint(whole)
    assert fingerprint(rewrite(whole, tmp_path / "copy", dict(reversed(tensors.items())))) == original
    assert fingerprint(whole, "bfloat16") != original
    changed = tensors[Q_PROJ].clone()
    changed[200, 63] += 1e-3
    assert fingerprint(rewrite(whole, tmp_path / "changed", tensors | {Q_PROJ: changed})) != original
    config = json.loads((whole / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 12345.0
    assert fingerprint(rewrite(whole, tmp_path / "config", tensors, config)) != original


def test_auto_serves_in_the_stored_dtype_and_others_convert(whole: Path, tmp_path: Path) -> None:
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in tensors_of(whole).items()}
    folder = rewrite(whole, tmp_path / "bf16", halved)
    assert load_model(ModelSource(path=str(folder))).model.dtype == "bfloat16"
    for dtype in ("float32", "bfloat16", "float16"):
        assert load_model(ModelSource(path=str(folder), dtype=dtype)).model.dtype == dtype
    with pytest.raises(ConfigError, match="int8"):
        load_model(ModelSource(path=str(folder), dtype="int8"))


def test_an_equal_stored_copy_of_a_tied_head_is_dropped_and_another_one_is_used(variant: MakeVariant, tmp_path: Path) -> None:
    tied = variant("tied").folder
    tensors = tensors_of(tied)
    embedding = tensors["model.embed_tokens.weight"]
    hidden = torch.randn(2, embedding.shape[1])
    for name, head in (("equal", embedding.clone()), ("other", embedding + 1.0)):
        loaded = load_model(ModelSource(path=str(rewrite(tied, tmp_path / name, tensors | {"lm_head.weight": head}))))
        torch.testing.assert_close(loaded.model.logits(hidden), hidden @ head.T, rtol=1e-4, atol=1e-4)


def test_the_context_limit_is_the_checkpoints_unless_lowered(whole: Path) -> None:
    assert load_model(ModelSource(path=str(whole))).max_context_tokens == 1024
    assert load_model(ModelSource(path=str(whole), max_context_tokens=100)).max_context_tokens == 100
    for wrong in (-1, 1025):
        with pytest.raises(ConfigError, match="max_context_tokens"):
            load_model(ModelSource(path=str(whole), max_context_tokens=wrong))


def test_an_unknown_device_is_refused(whole: Path) -> None:
    with pytest.raises(ConfigError, match="tpu"):
        load_model(ModelSource(path=str(whole)), device="tpu")
