"""Checkpoints in the released form: K3's names, BF16 and F32 where the released one has them, MXFP4 experts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.tokenizer import VOCABULARY_FILE
from train.experts import CODE_VALUES, GROUP, mxfp4_pack

PREFIX = "language_model."
F32_SUFFIXES = ("_conv1d.weight", ".A_log", ".dt_bias", ".o_norm.weight", ".e_score_correction_bias")
WEIGHTS_FILE = "model.safetensors"
A_LOG_ROWS = 128  # the released padding


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, fp32 parameters in the network's form) of a checkpoint folder."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(shard)
    dense = {}
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX) or name.endswith(".weight_scale"):
            continue
        if name.endswith(".weight_packed"):
            tensor = mxfp4_unpack(tensor, tensors[name.replace("_packed", "_scale")])
            name = name.replace("_packed", "")
        dense[name.removeprefix(PREFIX)] = tensor.float()
    return config, _stacked(dense, config["text_config"]["num_experts"])


def _stacked(tensors: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = sorted({name.split("experts.")[0] for name in tensors if ".experts." in name})
    for layer in layers:
        each = [{w: tensors[f"{layer}experts.{e}.{w}.weight"] for w in ("w1", "w2", "w3")} for e in range(experts)]
        out[f"{layer}experts.w13"] = torch.stack([torch.cat([expert["w1"], expert["w3"]]) for expert in each])
        out[f"{layer}experts.w2"] = torch.stack([expert["w2"] for expert in each])
    return out


def mxfp4_unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 [out,in] of weight_packed and weight_scale."""
    table = torch.tensor([*CODE_VALUES, *(-value for value in CODE_VALUES)])
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    values = table[codes].reshape(*scale.shape, GROUP)
    weight: Tensor = values * torch.exp2(scale.float() - 127.0)[..., None]
    return weight.flatten(-2)


def export(params: Mapping[str, Tensor], config: Mapping[str, Any], vocabulary: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and tiktoken.model, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in params.items():
        tensor = tensor.detach()
        if ".experts." in name:
            tensors |= _packed_experts(f"{PREFIX}{name}", tensor)
        elif name.endswith(F32_SUFFIXES):
            tensors[PREFIX + name] = tensor.float().contiguous()
        else:
            tensors[PREFIX + name] = tensor.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / f".{WEIGHTS_FILE}", metadata={"format": "pt"})
    (folder / f".{WEIGHTS_FILE}").rename(folder / WEIGHTS_FILE)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if vocabulary.resolve() != (folder / VOCABULARY_FILE).resolve():
        shutil.copyfile(vocabulary, folder / VOCABULARY_FILE)


def _packed_experts(name: str, stacked: Tensor) -> dict[str, Tensor]:
    layer, kind = name.rsplit(".", 1)  # ...block_sparse_moe.experts , w13 or w2
    out = {}
    for expert, weight in enumerate(stacked):
        matrices = dict(zip(("w1", "w3"), weight.chunk(2), strict=True)) if kind == "w13" else {"w2": weight}
        for matrix, value in matrices.items():
            packed, scale = mxfp4_pack(value)
            out[f"{layer}.{expert}.{matrix}.weight_packed"] = packed.contiguous()
            out[f"{layer}.{expert}.{matrix}.weight_scale"] = scale.contiguous()
    return out
