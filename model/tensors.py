"""The tensors a checkpoint must hold: name, shape and stored dtypes, derived from the config. Torch-free.

Names are those of the released K3 checkpoint without its `language_model.` prefix; Kimi-Linear has no prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from model.config import ModelConfig

STORED_DTYPE = {"bfloat16": "BF16", "float32": "F32"}  # config.json's word -> safetensors' word
VISION_PREFIXES = ("vision_tower.", "mm_projector.")  # recognised and left unread


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor must look like. `padded`: one dimension, longer is fine, the front counts."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    padded: bool = False

    def accepts_shape(self, shape: tuple[int, ...]) -> bool:
        if self.padded:
            return len(shape) == 1 and shape[0] >= self.shape[0]
        return shape == self.shape

    def describe_shape(self) -> str:
        return f"[{self.shape[0]} or more]" if self.padded else str(list(self.shape))


def name_prefix(config: ModelConfig) -> str:
    return "language_model." if config.family == "kimi_k3" else ""


def expert_name(layer: int, index: int, matrix: str) -> str:
    return f"model.layers.{layer}.block_sparse_moe.experts.{index}.{matrix}"


def expected_tensors(config: ModelConfig, *, experts_packed: bool) -> dict[str, TensorSpec]:
    """Every tensor of the text network, by its name without the family's prefix."""
    stored = (STORED_DTYPE[config.dtype],)
    size = config.hidden_size
    table = {
        "model.embed_tokens.weight": TensorSpec((config.vocab_size, size), stored),
        "model.norm.weight": TensorSpec((size,), stored),
        "lm_head.weight": TensorSpec((config.vocab_size, size), stored),
    }
    if config.attn_res_block_size is not None:
        table["model.output_attn_res_norm.weight"] = TensorSpec((size,), stored)
        table["model.output_attn_res_proj.weight"] = TensorSpec((1, size), stored)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            table[f"{at}{name}.weight"] = TensorSpec((size,), stored)
        if config.attn_res_block_size is not None:
            for name in ("self_attention_res", "mlp_res"):
                table[f"{at}{name}_norm.weight"] = TensorSpec((size,), stored)
                table[f"{at}{name}_proj.weight"] = TensorSpec((1, size), stored)
        attention = _mla(config) if config.is_mla(layer) else _kda(config)
        table.update((f"{at}self_attn.{name}", spec) for name, spec in attention)
        if layer < config.dense_layers:
            mlp = _mlp(config, config.intermediate_size)
            table.update((f"{at}mlp.{name}", spec) for name, spec in mlp)
        else:
            table.update((f"{at}block_sparse_moe.{name}", spec) for name, spec in _moe(config))
            table.update(_experts(config, layer, experts_packed))
    return table


def _kda(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    stored = (STORED_DTYPE[config.dtype],)
    # K3 stores these few in F32 whatever the rest is in; Kimi-Linear files differ, so either passes there.
    exact = ("F32",) if config.family == "kimi_k3" else ("F32", "BF16")
    size, heads, dim = config.hidden_size, config.kda_heads, config.kda_head_dim
    channels = heads * dim
    for name in ("q", "k", "v"):
        yield f"{name}_proj.weight", TensorSpec((channels, size), stored)
        yield f"{name}_conv1d.weight", TensorSpec((channels, 1, config.conv_kernel), exact)
    if config.family == "kimi_k3":
        yield "A_log", TensorSpec((heads,), ("F32",), padded=True)
    else:
        yield "A_log", TensorSpec((1, 1, heads, 1), ("F32",))
    yield "dt_bias", TensorSpec((channels,), ("F32",))
    yield "b_proj.weight", TensorSpec((heads, size), stored)
    yield "f_a_proj.weight", TensorSpec((dim, size), stored)
    yield "f_b_proj.weight", TensorSpec((channels, dim), stored)
    if config.kda_full_rank_gate:
        yield "g_proj.weight", TensorSpec((channels, size), stored)
    else:
        yield "g_a_proj.weight", TensorSpec((dim, size), stored)
        yield "g_b_proj.weight", TensorSpec((channels, dim), stored)
    yield "o_norm.weight", TensorSpec((dim,), exact)
    yield "o_proj.weight", TensorSpec((size, channels), stored)


def _mla(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    stored = (STORED_DTYPE[config.dtype],)
    size, heads = config.hidden_size, config.num_heads
    query = heads * (config.qk_nope_dim + config.qk_rope_dim)
    if config.q_lora_rank is None:
        yield "q_proj.weight", TensorSpec((query, size), stored)
    else:
        yield "q_a_proj.weight", TensorSpec((config.q_lora_rank, size), stored)
        yield "q_a_layernorm.weight", TensorSpec((config.q_lora_rank,), stored)
        yield "q_b_proj.weight", TensorSpec((query, config.q_lora_rank), stored)
    yield "kv_a_proj_with_mqa.weight", TensorSpec((config.row_width, size), stored)
    yield "kv_a_layernorm.weight", TensorSpec((config.kv_lora_rank,), stored)
    expanded = heads * (config.qk_nope_dim + config.v_dim)
    yield "kv_b_proj.weight", TensorSpec((expanded, config.kv_lora_rank), stored)
    if config.mla_output_gate:
        yield "g_proj.weight", TensorSpec((heads * config.v_dim, size), stored)
    yield "o_proj.weight", TensorSpec((size, heads * config.v_dim), stored)


def _mlp(config: ModelConfig, width: int) -> Iterator[tuple[str, TensorSpec]]:
    stored = (STORED_DTYPE[config.dtype],)
    yield "gate_proj.weight", TensorSpec((width, config.hidden_size), stored)
    yield "up_proj.weight", TensorSpec((width, config.hidden_size), stored)
    yield "down_proj.weight", TensorSpec((config.hidden_size, width), stored)


def _moe(config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    stored = (STORED_DTYPE[config.dtype],)
    size = config.hidden_size
    yield "gate.weight", TensorSpec((config.num_experts, size), stored)
    exact = ("F32",) if config.family == "kimi_k3" else ("F32", "BF16")
    yield "gate.e_score_correction_bias", TensorSpec((config.num_experts,), exact)
    if config.latent_size is not None:
        yield "routed_expert_down_proj.weight", TensorSpec((config.latent_size, size), stored)
        yield "routed_expert_up_proj.weight", TensorSpec((size, config.latent_size), stored)
        yield "routed_expert_norm.weight", TensorSpec((config.latent_size,), stored)
    for name, spec in _mlp(config, config.shared_intermediate_size):
        yield f"shared_experts.{name}", spec


def _experts(config: ModelConfig, layer: int, packed: bool) -> Iterator[tuple[str, TensorSpec]]:
    inner, outer = config.expert_intermediate_size, config.expert_size
    for index in range(config.num_experts):
        for matrix, rows, columns in (("w1", inner, outer), ("w3", inner, outer), ("w2", outer, inner)):
            name = expert_name(layer, index, matrix)
            if packed:
                assert config.mxfp4_group is not None, "the loader refuses packed experts without a group size"
                yield f"{name}.weight_packed", TensorSpec((rows, columns // 2), ("U8",))
                yield f"{name}.weight_scale", TensorSpec((rows, columns // config.mxfp4_group), ("U8",))
            else:
                yield f"{name}.weight", TensorSpec((rows, columns), (STORED_DTYPE[config.dtype],))
