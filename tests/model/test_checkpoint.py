"""Checked loading: whatever is wrong with a weight file is named, with what was expected and what was found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import PackedTensor, Weights, load_weights, weights_revision
from model.config import load_config
from model.errors import CheckpointError
from tests.golden import golden_dir

Tensors = dict[str, torch.Tensor]
SHARD = "model-00002-of-00003.safetensors"
EXPERT = "language_model.model.layers.3.block_sparse_moe.experts.0.w1"
NORM = "language_model.model.layers.3.input_layernorm.weight"


def load(path: Path) -> Weights:
    return load_weights(path, load_config(path))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden_dir("k3_tiny_mxfp4"), tmp_path / "sharded"))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden_dir("k3_tiny_smooth"), tmp_path / "single"))


def rewrite(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("name", ["k3_tiny", "k3_tiny_mxfp4", "k3_tiny_smooth", "kimi_linear_tiny"])
def test_every_tensor_is_the_file_s(name: str) -> None:
    folder = golden_dir(name)
    weights = load(folder)
    prefix = "" if name == "kimi_linear_tiny" else "language_model."
    stored: Tensors = {}
    for path in folder.glob("model*.safetensors"):
        stored |= load_file(path)
    text = {key.removeprefix(prefix): t for key, t in stored.items() if key.startswith(prefix)}
    assert set(weights) == set(text)
    assert len(weights) == len(text)
    for key in weights:
        if not key.endswith("A_log"):
            assert weights[key].dtype == text[key].dtype
            assert torch.equal(weights[key], text[key])
    if name == "k3_tiny":
        assert any(key.startswith("vision_tower.") for key in stored)
        assert not any("vision" in key or "projector" in key for key in weights)


@pytest.mark.parametrize(("name", "stored"), [("k3_tiny_mxfp4", [128]), ("kimi_linear_tiny", [1, 1, 4, 1])])
def test_a_log_loses_its_padding(name: str, stored: list[int]) -> None:
    folder, key = golden_dir(name), "model.layers.0.self_attn.A_log"
    weights, prefix = load(folder), "language_model." if name == "k3_tiny_mxfp4" else ""
    raw = next(
        t[prefix + key] for t in map(load_file, sorted(folder.glob("model*.safetensors"))) if prefix + key in t
    )
    assert list(raw.shape) == stored
    heads = weights.config.kda_heads
    assert torch.equal(weights[key], raw.flatten()[:heads])


def test_experts_come_in_their_stored_form() -> None:
    packed = load(golden_dir("k3_tiny_mxfp4"))
    expert = packed.expert(1, 7, "w2")
    assert packed.experts_packed
    assert isinstance(expert, PackedTensor)
    assert (expert.shape, expert.packed.shape, expert.scale.shape) == ((96, 64), (96, 32), (96, 2))
    plain = load(golden_dir("k3_tiny_smooth"))
    assert not plain.experts_packed
    assert plain.expert(1, 5, "w1").dtype == torch.bfloat16


def test_tensors_are_views_of_the_mapped_file(single: Path) -> None:
    weights = load(single)
    first, again = weights["lm_head.weight"], weights["lm_head.weight"]
    assert first.data_ptr() == again.data_ptr()
    before = (single / "model.safetensors").read_bytes()
    first.fill_(3.0)  # never done by the backends; the file must survive it all the same
    assert (single / "model.safetensors").read_bytes() == before


def test_misaligned_data_loads(single: Path) -> None:
    """The format lets data start anywhere; another header length shifts every tensor by an odd number of bytes."""
    path = single / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip(b" ")
    header += b" " * (1 - (8 + len(header)) % 2)
    assert (8 + len(header)) % 2 == 1
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    shifted, original = load(single), load(golden_dir("k3_tiny_smooth"))
    for name in original:
        assert torch.equal(shifted[name], original[name]), name


def error_of(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return caught.value


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SHARD).unlink()
    assert SHARD in str(error_of(sharded))


def test_a_directory_without_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    assert "model.safetensors" in str(error_of(single))


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_shard_is_named(sharded: Path, keep: int) -> None:
    raw = (sharded / SHARD).read_bytes()
    (sharded / SHARD).write_bytes(raw[:keep])
    message = str(error_of(sharded))
    assert SHARD in message
    assert "cut short" in message


def test_a_shard_with_trailing_bytes_is_named(sharded: Path) -> None:
    with (sharded / SHARD).open("ab") as file:
        file.write(b"x")
    assert "too long" in str(error_of(sharded))


def test_a_shard_that_is_something_else_is_named(sharded: Path) -> None:
    (sharded / SHARD).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert SHARD in str(error_of(sharded))
    (sharded / SHARD).write_bytes((4).to_bytes(8, "little") + b"{{{{")
    assert SHARD in str(error_of(sharded))


@pytest.mark.parametrize(
    ("name", "tensor", "expected", "found"),
    [
        (NORM, torch.zeros(175, dtype=torch.bfloat16), "shape [176]", "shape [175]"),
        (NORM, torch.zeros(1, 176, dtype=torch.bfloat16), "shape [176]", "shape [1, 176]"),
        (NORM, torch.zeros(176), "dtype BF16", "dtype F32"),
        (f"{EXPERT}.weight_packed", torch.zeros(48, 64, dtype=torch.uint8), "[64, 48]", "[48, 64]"),
        (f"{EXPERT}.weight_scale", torch.zeros(64, 3, dtype=torch.int8), "dtype U8", "dtype I8"),
    ],
)
def test_a_wrong_shape_or_dtype_is_named(
    sharded: Path, name: str, tensor: torch.Tensor, expected: str, found: str
) -> None:
    rewrite(sharded / SHARD, lambda tensors: tensors.update({name: tensor}))
    message = str(error_of(sharded))
    for part in (SHARD, name, expected, found):
        assert part in message


def test_a_short_a_log_is_named(single: Path) -> None:
    name = "language_model.model.layers.0.self_attn.A_log"
    rewrite(single / "model.safetensors", lambda tensors: tensors.update({name: torch.zeros(1)}))
    message = str(error_of(single))
    for part in (name, "[2 or more]", "[1]"):
        assert part in message


def test_a_tensor_missing_from_a_single_file_is_named(single: Path) -> None:
    rewrite(single / "model.safetensors", lambda tensors: tensors.pop("language_model.lm_head.weight"))
    message = str(error_of(single))
    assert "language_model.lm_head.weight" in message
    assert "shape [288, 160]" in message


def test_a_tensor_that_the_index_promises_but_the_shard_lacks_is_named(sharded: Path) -> None:
    rewrite(sharded / SHARD, lambda tensors: tensors.pop(NORM))
    message = str(error_of(sharded))
    assert SHARD in message
    assert NORM in message


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.safetensors.index.json").read_text())


def write_index(folder: Path, index: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_tensor_that_neither_index_nor_shards_have_is_named(sharded: Path) -> None:
    rewrite(sharded / SHARD, lambda tensors: tensors.pop(NORM))
    index = index_of(sharded)
    del index["weight_map"][NORM]
    write_index(sharded, index)
    assert NORM in str(error_of(sharded))


def test_a_tensor_that_the_index_does_not_place_is_named(sharded: Path) -> None:
    index = index_of(sharded)
    del index["weight_map"][NORM]
    write_index(sharded, index)
    message = str(error_of(sharded))
    assert SHARD in message
    assert NORM in message


@pytest.mark.parametrize("extra", ["language_model.model.layers.3.self_attn.q_proj.weight", "model.norm.weight"])
def test_an_unexpected_tensor_is_named(sharded: Path, extra: str) -> None:
    rewrite(sharded / SHARD, lambda tensors: tensors.update({extra: torch.zeros(2, 2)}))
    index = index_of(sharded)
    index["weight_map"][extra] = SHARD
    write_index(sharded, index)
    message = str(error_of(sharded))
    for part in (SHARD, extra, "F32 [2, 2]"):
        assert part in message


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "model.bin", "", 7, None])
def test_an_index_that_points_elsewhere_is_refused(sharded: Path, place: object) -> None:
    index = index_of(sharded)
    index["weight_map"][NORM] = place
    write_index(sharded, index)
    assert NORM in str(error_of(sharded))


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_of_another_form_is_refused(sharded: Path, index: object) -> None:
    write_index(sharded, index)
    assert "index.json" in str(error_of(sharded))


def test_packed_experts_and_the_quantization_config_must_agree(sharded: Path, single: Path) -> None:
    config = json.loads((sharded / "config.json").read_text())
    quantization = config["text_config"].pop("quantization_config")
    (sharded / "config.json").write_text(json.dumps(config))
    assert "quantization_config" in str(error_of(sharded))
    config = json.loads((golden_dir("k3_tiny_smooth") / "config.json").read_text())
    config["text_config"]["quantization_config"] = quantization
    config["text_config"]["routed_expert_hidden_size"] = 128
    (single / "config.json").write_text(json.dumps(config))
    assert "weight_packed" in str(error_of(single))


def entry_changes() -> list[Callable[[dict[str, Any]], object]]:
    return [
        lambda entry: entry.pop("dtype"),
        lambda entry: entry.update(dtype="F8_E4M3"),
        lambda entry: entry.update(shape=[-1]),
        lambda entry: entry.update(shape="176"),
        lambda entry: entry.update(data_offsets=[0]),
        lambda entry: entry.update(data_offsets=[0, 3]),
        lambda entry: entry.update(data_offsets=[o + 2 for o in entry["data_offsets"]]),
    ]


@pytest.mark.parametrize("change", entry_changes())
def test_headers_that_lie_are_named(single: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = single / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header["language_model.model.norm.weight"])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    assert str(path) in str(error_of(single))


def test_the_revision_covers_every_byte_and_the_config(single: Path) -> None:
    original = weights_revision(golden_dir("k3_tiny_smooth"))
    assert weights_revision(single) == original
    assert len(original) == 32
    raw = bytearray((single / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (single / "model.safetensors").write_bytes(raw)
    changed = weights_revision(single)
    assert changed != original
    config = json.loads((single / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 2e-5
    (single / "config.json").write_text(json.dumps(config))
    assert len({weights_revision(single), changed, original}) == 3
