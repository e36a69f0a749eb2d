"""Drafters with random weights for the tiny golden model that the workers' tests serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from model.config import load_config
from model.drafter.config import parse_drafter_config
from tests.golden import golden_dir
from tests.model.test_drafter import WHERE, random_tensors, small


def write_drafter(folder: Path, *, seed: int = 0, poison: str | None = None, **change: Any) -> Path:
    """A DSpark drafter in `folder`; `poison` names a tensor that is NaN, `change` fields of its config."""
    target = load_config(golden_dir("k3_tiny_smooth"))
    raw = small("dspark") | {
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "target_num_hidden_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
    }
    tensors = random_tensors(parse_drafter_config(raw, target, path=WHERE), seed)
    if poison is not None:
        tensors[poison] = torch.full_like(tensors[poison], float("nan"))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw | change))
    save_file(tensors, folder / "model.safetensors")
    return folder
