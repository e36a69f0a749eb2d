"""The training network against the golden logits, and its checkpoints against the serving model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.backend import load_backend
from model.logits import logits_by_chunk
from tests.golden import golden_dir
from train import checkpoint, nano
from train.experts import mxfp4_round
from train.network import Network, Shape


def tiny_config() -> dict[str, Any]:
    """k3-nano's config with small widths: every kind of layer, two blocks of residual attention."""
    config = nano.config(256)
    config["text_config"] |= {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attn_res_block_size": 2,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
    }
    linear = {"head_dim": 32, "num_heads": 2, "full_attn_layers": [3, 4], "kda_layers": [1, 2]}
    config["text_config"]["linear_attn_config"] |= linear
    return config


@pytest.mark.parametrize(("name", "tolerance"), [("k3_tiny_mxfp4", 1e-4), ("k3_tiny_smooth", 2e-5)])
@pytest.mark.parametrize("length", [1, 33, 130])
def test_network_equals_the_golden_logits(name: str, tolerance: float, length: int) -> None:
    folder = golden_dir(name)
    config, params = checkpoint.load(folder)
    golden = load_file(folder / "golden.safetensors")
    with torch.no_grad():
        got = Network(Shape.of(config)).logits(params, golden[f"len{length}.ids"][None])[0]
    want = golden[f"len{length}.logits"]
    assert (got - want).norm() / want.norm() < tolerance


def test_an_exported_checkpoint_serves_what_was_trained(tmp_path: Path) -> None:
    config = tiny_config()
    params = nano.initial(Shape.of(config), seed=0)
    for name, value in params.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "up_proj.weight", "res_proj.weight")):
            value.normal_(0, 0.1)  # what starts at zero would hide its layer
    vocabulary = golden_dir("chat") / "tiktoken.model"
    checkpoint.export(params, config, vocabulary, tmp_path)
    stored_config, stored = checkpoint.load(tmp_path)
    assert stored_config == config
    for name, value in params.items():
        stored_as = value if name.endswith(checkpoint.F32_SUFFIXES) else value.to(torch.bfloat16).float()
        assert torch.equal(stored[name], mxfp4_round(value) if ".experts." in name else stored_as), name
    ids = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        want = Network(Shape.of(config)).logits(stored, torch.tensor([ids]))[0]
    backend = load_backend(tmp_path, kind="torch", threads=1, numerics="invariant")
    got = torch.cat(list(logits_by_chunk(backend, ids)))
    assert (got - want).norm() / want.norm() < 2e-5
