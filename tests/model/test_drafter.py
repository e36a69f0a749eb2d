"""Drafters: the published forms are read and mismatches refused by name; rows are the same however they are made."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model.config import ModelConfig, load_config
from model.drafter.config import DrafterConfig, Rope, parse_drafter_config
from model.drafter.network import Drafter, drafter_id, load_drafter
from model.drafter.rotary import attention_scale, frequencies, rotate
from model.drafter.tensors import expected_tensors, unread_tensors
from model.errors import CheckpointError, ConfigError
from tests.golden import golden_dir

WHERE = Path("drafter/config.json")
Json = dict[str, Any]


def target() -> ModelConfig:
    return load_config(golden_dir("k3_tiny_mxfp4"))


def released_target() -> ModelConfig:
    return replace(target(), vocab_size=163840, hidden_size=7168, num_layers=93)


def released_dspark() -> Json:
    """config.json of Inferact/Kimi-K3-DSpark."""
    return {
        "architectures": ["K3DSparkModel"], "model_type": "k3_dspark", "hidden_size": 7168,
        "intermediate_size": 14336, "num_hidden_layers": 5, "num_attention_heads": 64, "num_key_value_heads": 64,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "mla_use_nope": False, "mla_use_output_gate": False, "vocab_size": 163840, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 1048576, "rope_theta": 50000.0, "num_target_layers": 5,
        "target_hidden_size": 7168, "target_num_hidden_layers": 93, "target_layer_ids": [2, 23, 47, 71, 89],
        "mask_token_id": 163837, "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
        "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "tie_word_embeddings": False, "draft_vocab_size": 163840,
        "_torchspec_version": "0.1.0", "torch_dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32768, "rope_theta": 50000.0,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    }  # fmt: skip


def released_dflash() -> Json:
    """A DFlash drafter of K3 with the sizes that are known of one; taps as published."""
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 7168, "intermediate_size": 14336,
        "num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 16, "head_dim": 128,
        "vocab_size": 163840, "rms_norm_eps": 1e-06, "torch_dtype": "bfloat16", "attention_bias": False,
        "layer_types": ["sliding_attention"] * 6, "sliding_window": 4096, "rope_theta": 1000000.0,
        "block_size": 16, "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [19, 37, 54, 66, 78, 90]},
    }  # fmt: skip


def small(form: str) -> Json:
    """A drafter of the tiny golden model."""
    model = target()
    common = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size, "torch_dtype": "float32"}
    if form == "dflash":
        section = {"mask_token_id": 5, "target_layer_ids": [1, 2]}
        return released_dflash() | common | {
            "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6,
            "block_size": 5, "dflash_config": section,
        }  # fmt: skip
    return released_dspark() | common | {
        "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "num_target_layers": 2, "target_layer_ids": [1, 2], "target_hidden_size": model.hidden_size,
        "target_num_hidden_layers": model.num_layers, "mask_token_id": 5, "draft_vocab_size": model.vocab_size,
        "markov_rank": 6, "block_size": 4,
    }  # fmt: skip


def random_tensors(config: DrafterConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(spec.shape, generator=rng) / math.sqrt(spec.shape[-1]) + (len(spec.shape) == 1)
        for name, spec in expected_tensors(config).items()
    }


def drafter(form: str, seed: int = 0) -> Drafter:
    config = parse_drafter_config(small(form), target(), path=WHERE)
    rng = torch.Generator().manual_seed(seed + 1)
    embedding, head = (torch.randn(config.vocab, config.hidden, generator=rng) for _ in range(2))
    return Drafter(config, random_tensors(config, seed), embedding, head)


def test_the_released_dspark_drafter_is_read():
    config = parse_drafter_config(released_dspark(), released_target(), path=WHERE)
    assert (config.layers, config.row_width, config.block_len, config.slots) == (5, 576, 7, 7)
    assert config.layers * config.row_width * 2 == 33_408 - 27_648  # bytes a token beside the target's bf16 rows
    table = expected_tensors(config)
    in_file = {**table, "embed_tokens.weight": unread_tensors(config)["embed_tokens.weight"]}
    assert len(in_file) == 68
    assert sum(math.prod(spec.shape) for spec in in_file.values()) == pytest.approx(3.562e9, rel=2e-4)
    assert table["context_proj.weight"].shape == (7168, 35840)
    assert table["confidence_head.proj.weight"].shape == (1, 7424)


def test_the_dflash_form_is_read():
    config = parse_drafter_config(released_dflash(), released_target(), path=WHERE)
    assert (config.block_len, config.slots, config.windows[0]) == (15, 16, 4096)
    assert expected_tensors(config)["layers.5.self_attn.k_proj.weight"].shape == (2048, 7168)


@pytest.mark.parametrize(
    ("form", "change", "named"),
    [
        ("dspark", {"vocab_size": 7, "draft_vocab_size": 7}, "vocab_size"),
        ("dspark", {"hidden_size": 8}, "hidden_size"),
        ("dspark", {"target_num_hidden_layers": 93}, "target_num_hidden_layers"),
        ("dspark", {"target_layer_ids": [1, 99]}, "target_layer_ids"),
        ("dspark", {"target_layer_ids": [2, 1]}, "target_layer_ids"),
        ("dspark", {"target_layer_ids": [1]}, "num_target_layers"),
        ("dspark", {"draft_vocab_size": 9}, "draft_vocab_size"),
        ("dspark", {"mask_token_id": 10**6}, "mask_token_id"),
        ("dspark", {"mla_use_nope": True}, "mla_use_nope"),
        ("dspark", {"block_size": 0}, "block_size"),
        ("dspark", {"new_trick": 1}, "new_trick"),
        ("dspark", {"architectures": ["Eagle"]}, "architectures"),
        ("dflash", {"dflash_config": {"mask_token_id": 5}}, "dflash_config.target_layer_ids"),
        ("dflash", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("dflash", {"sliding_window": None}, "sliding_window"),
        ("dflash", {"block_size": 1}, "block_size"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_by_name(form: str, change: Json, named: str):
    with pytest.raises(ConfigError) as caught:
        parse_drafter_config(small(form) | change, target(), path=WHERE)
    assert caught.value.field == named


@pytest.mark.parametrize("form", ["dspark", "dflash"])
def test_every_field_is_needed(form: str):
    optional = {"block_size", "num_key_value_heads", "rope_theta", "target_num_hidden_layers", "tie_word_embeddings"}
    for name in small(form):
        raw = copy.deepcopy(small(form))
        del raw[name]
        try:
            parse_drafter_config(raw, target(), path=WHERE)
        except ConfigError as error:
            assert error.field == name or name in ("layer_types", "architectures")
        else:
            ignored = {"max_position_embeddings", "_torchspec_version", "bos_token_id", "eos_token_id"}
            assert name in optional | ignored | {"pad_token_id", "attention_bias", "layer_types", "sliding_window"}


@pytest.mark.parametrize("asked", [0, 5])
def test_a_draft_length_outside_the_block_is_refused(asked: int):
    with pytest.raises(ConfigError, match="1 to 4"):
        parse_drafter_config(small("dspark"), target(), path=WHERE, block_len=asked)
    with pytest.raises(ValueError, match="1 to 4"):
        rows = torch.zeros(2, 0, 20)
        drafter("dspark").draft(1, 0, rows, asked, lambda _, logits: int(logits.argmax()))


@pytest.mark.parametrize("form", ["dspark", "dflash"])
def test_a_checkpoint_is_read_and_a_wrong_tensor_named(form: str, tmp_path: Path):
    import json

    config = parse_drafter_config(small(form), target(), path=WHERE)
    (tmp_path / "config.json").write_text(json.dumps(small(form)))
    tensors = random_tensors(config)
    embedding = torch.randn(config.vocab, config.hidden)
    save_file(tensors | {"embed_tokens.weight": embedding}, tmp_path / "model.safetensors")
    loaded = load_drafter(tmp_path, target(), embedding, embedding)
    assert loaded.config == config
    first = next(iter(tensors))
    save_file(tensors | {first: torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=first):
        load_drafter(tmp_path, target(), embedding, embedding)
    save_file({name: t for name, t in tensors.items() if name != first}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=first):
        load_drafter(tmp_path, target(), embedding, embedding)
    save_file(tensors | {"layers.9.extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.9\.extra"):
        load_drafter(tmp_path, target(), embedding, embedding)


@pytest.mark.parametrize("form", ["dspark", "dflash"])
def test_rows_do_not_depend_on_how_they_were_made(form: str):
    found = drafter(form)
    taps = torch.randn(20, 2, found.config.hidden)
    whole = found.context_rows(taps, 0)
    pieces = [found.context_rows(taps[a:b], a) for a, b in ((0, 3), (3, 4), (4, 20))]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)
    assert whole.shape == (2, 20, found.config.row_width)


@pytest.mark.parametrize("form", ["dspark", "dflash"])
def test_a_shorter_draft_sees_a_shorter_block(form: str):
    """The block attends both ways, so its length is part of what is drafted; the anchor's place is the first slot."""
    found = drafter(form)
    rows = found.context_rows(torch.randn(9, 2, found.config.hidden), 0)

    def greedy(slot: int, logits: torch.Tensor) -> int:
        return int(logits.argmax())

    four, again = (found.draft(3, 9, rows, 4, greedy) for _ in range(2))
    assert four.tokens == again.tokens and torch.equal(four.logits, again.logits)
    assert not torch.equal(found.draft(3, 9, rows, 2, greedy).logits, four.logits[:2])
    assert not torch.equal(found.draft(4, 9, rows, 4, greedy).logits, four.logits)
    assert (four.confidence is not None) == (form == "dspark")
    with pytest.raises(ValueError, match="expected rows"):
        found.draft(3, 8, rows, 4, greedy)


def test_the_markov_head_sees_the_token_that_was_chosen():
    found = drafter("dspark")
    rows = found.context_rows(torch.randn(4, 2, found.config.hidden), 0)
    one = found.draft(3, 4, rows, 3, lambda slot, logits: 7)
    two = found.draft(3, 4, rows, 3, lambda slot, logits: 8)
    assert torch.equal(one.logits[0], two.logits[0])
    bias = found._t["markov_head.markov_w1"] @ found._t["markov_head.markov_w2"].T
    torch.testing.assert_close(one.logits[1] - two.logits[1], bias[7] - bias[8], rtol=1e-4, atol=1e-4)


def test_a_sliding_layer_does_not_see_further():
    found = drafter("dflash")
    only_sliding = replace(found.config, windows=(6, 6))
    found = Drafter(only_sliding, {f"{n}.weight": t for n, t in found._t.items()}, found._embedding, found._head)
    taps = torch.randn(30, 2, found.config.hidden)
    rows = found.context_rows(taps, 0)
    changed = rows.clone()
    changed[:, :20] = torch.randn_like(changed[:, :20])
    pick = [found.draft(3, 30, r, 4, lambda _, logits: int(logits.argmax())).logits for r in (rows, changed)]
    assert torch.equal(pick[0], pick[1])
    changed[:, 25:] += 1.0
    assert not torch.equal(found.draft(3, 30, changed, 4, lambda _, logits: 0).logits, pick[0])


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_depends_on_the_distance_alone(interleaved: bool):
    """q at p and k at p - d score the same for every p, at YaRN's frequencies too."""
    yarn = Rope(dim=64, theta=50000.0, factor=32.0, original_len=32768, mscale=1.0, mscale_all_dim=1.0)
    for rope in (Rope(dim=64, theta=10000.0), yarn):
        q, k = torch.randn(2, 1, 64)
        scores = []
        for p in (10, 500, 4000):
            turned = [rotate(x, torch.tensor([at]), rope, interleaved=interleaved) for x, at in ((q, p), (k, p - 7))]
            scores.append(float((turned[0] * turned[1]).sum()))
        assert scores == pytest.approx([scores[0]] * 3, abs=1e-2)
    plain, scaled = frequencies(Rope(dim=64, theta=50000.0)), frequencies(yarn)
    assert scaled[0] == plain[0]  # the fastest pair turns as before
    assert scaled[-1] == pytest.approx(float(plain[-1]) / 32)
    assert attention_scale(yarn, 192) == pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2)


def test_ids_name_the_drafter_and_its_target():
    found = drafter("dspark")
    tensors = random_tensors(found.config)
    same = drafter_id(found.config, tensors, "a")
    assert same == drafter_id(found.config, dict(reversed(tensors.items())), "a") and len(same) == 16
    assert same != drafter_id(found.config, tensors, "b")
    changed = tensors | {"final_norm.weight": tensors["final_norm.weight"] + 1}
    assert same != drafter_id(found.config, changed, "a")
