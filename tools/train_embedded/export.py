"""Turn a training folder into a Hugging Face folder: `python -m tools.train_embedded.export RUN FOLDER`.

Writes weights, config, tokeniser, the thinned training log and the sums of all files. The model card is written by `card`.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.train_embedded.checkpoint import write_folder
from tools.train_embedded.model import TrainedModel
from tools.train_embedded.recipe import architecture

__all__ = ["export", "main", "write_checksums"]

_LOG_LINES = 120


def export(run: Path, folder: Path) -> int:
    """Write the latest state of `run` to `folder`; returns the step it comes from."""
    tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    state = torch.load(run / "state.pt", weights_only=True)
    model = TrainedModel(architecture(tokenizer.get_vocab_size()))
    model.load_state_dict(state["model"])
    write_folder(model, tokenizer, folder)
    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    every = max(1, len(lines) // _LOG_LINES)
    (folder / "training-log.jsonl").write_text("".join(lines[every - 1 :: every]), encoding="utf-8")
    write_checksums(folder)
    return int(state["step"])


def write_checksums(folder: Path) -> None:
    """SHA256SUMS over every other file of the folder, as sha256sum writes it."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Export a training folder.")
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(f"exported step {export(args.run, args.folder)} to {args.folder}")


if __name__ == "__main__":
    main()
