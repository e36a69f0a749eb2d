"""The layers' weights made ready for eager torch: fp32, products that share an input stacked into one matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from model.checkpoint import PackedTensor, Weights
from model.config import ModelConfig
from model.ops import pointwise
from model.ops.linear.padded import Matrix, prepare
from model.ops.mxfp4.table import dequantize

Glu = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaLayer:
    """Shapes: conv [q|k|v][channels, kernel]; a_log [heads]; dt_bias [heads, K]; o_norm [V].

    `inputs` yields q, k, v, the decay's inner vector, beta, and the gate (its inner vector where it is low rank).
    """

    inputs: Matrix
    widths: tuple[int, ...]
    conv: torch.Tensor
    decay_out: Matrix
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    gate_out: Matrix | None
    o_norm: torch.Tensor
    out: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaLayer:
    """Shapes: key_up [heads, nope, rank] folds into the query; value_up [heads, rank, v].

    `inputs` yields the query (its inner vector where it is low rank), the row, and the gate where there is one.
    """

    inputs: Matrix
    widths: tuple[int, ...]
    q_norm: torch.Tensor | None
    q_out: Matrix | None
    row_norm: torch.Tensor
    key_up: torch.Tensor
    value_up: torch.Tensor
    out: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Shapes: bias [experts]; norm [latent]; with `latent_up` None the experts work on the full width."""

    router: Matrix
    bias: torch.Tensor
    latent_down: Matrix | None
    latent_up: Matrix | None
    norm: torch.Tensor | None
    gate_up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    shared: Mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Shapes: norms and mixes [hidden]; a mix is the norm's weight times the projection's."""

    input_norm: torch.Tensor
    attention: KdaLayer | MlaLayer
    post_norm: torch.Tensor
    ffn: Mlp | Moe
    attention_mix: torch.Tensor | None
    ffn_mix: torch.Tensor | None


class Builder:
    """Turns stored weights into layers."""

    def __init__(self, weights: Weights, row_multiple: int) -> None:
        self.weights = weights
        self.config: ModelConfig = weights.config
        self.row_multiple = row_multiple

    def matrix(self, *names: str) -> Matrix:
        stored = [self.weights[f"{name}.weight"] for name in names]
        return prepare(*stored, row_multiple=self.row_multiple)

    def vector(self, name: str) -> torch.Tensor:
        return self.weights[name].float().clone()

    def mix(self, at: str) -> torch.Tensor:
        return self.vector(f"{at}_norm.weight") * self.vector(f"{at}_proj.weight")[0]

    def layer(self, index: int) -> Layer:
        at = f"model.layers.{index}"
        mixes = self.config.attn_res_block_size is not None
        dense = index < self.config.dense_layers
        return Layer(
            input_norm=self.vector(f"{at}.input_layernorm.weight"),
            attention=self._mla(f"{at}.self_attn") if self.config.is_mla(index) else self._kda(f"{at}.self_attn"),
            post_norm=self.vector(f"{at}.post_attention_layernorm.weight"),
            ffn=self._mlp(f"{at}.mlp") if dense else self._moe(index),
            attention_mix=self.mix(f"{at}.self_attention_res") if mixes else None,
            ffn_mix=self.mix(f"{at}.mlp_res") if mixes else None,
        )

    def _kda(self, at: str) -> KdaLayer:
        config = self.config
        channels = config.kda_heads * config.kda_head_dim
        full = config.kda_full_rank_gate
        gate = "g_proj" if full else "g_a_proj"
        names = [f"{at}.{name}" for name in ("q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj", gate)]
        gate_width = channels if full else config.kda_head_dim
        return KdaLayer(
            inputs=self.matrix(*names),
            widths=(channels, channels, channels, config.kda_head_dim, config.kda_heads, gate_width),
            conv=torch.stack([self.vector(f"{at}.{name}_conv1d.weight")[:, 0] for name in "qkv"]),
            decay_out=self.matrix(f"{at}.f_b_proj"),
            a_log=self.vector(f"{at}.A_log"),
            dt_bias=self.vector(f"{at}.dt_bias").view(config.kda_heads, config.kda_head_dim),
            gate_out=None if full else self.matrix(f"{at}.g_b_proj"),
            o_norm=self.vector(f"{at}.o_norm.weight"),
            out=self.matrix(f"{at}.o_proj"),
        )

    def _mla(self, at: str) -> MlaLayer:
        config = self.config
        query_width = config.num_heads * (config.qk_nope_dim + config.qk_rope_dim)
        low_rank = config.q_lora_rank is not None
        names = [f"{at}.q_a_proj" if low_rank else f"{at}.q_proj", f"{at}.kv_a_proj_with_mqa"]
        widths = [config.q_lora_rank or query_width, config.row_width]
        if config.mla_output_gate:
            names.append(f"{at}.g_proj")
            widths.append(config.num_heads * config.v_dim)
        expand = self.vector(f"{at}.kv_b_proj.weight")
        expand = expand.view(config.num_heads, config.qk_nope_dim + config.v_dim, config.kv_lora_rank)
        return MlaLayer(
            inputs=self.matrix(*names),
            widths=tuple(widths),
            q_norm=self.vector(f"{at}.q_a_layernorm.weight") if low_rank else None,
            q_out=self.matrix(f"{at}.q_b_proj") if low_rank else None,
            row_norm=self.vector(f"{at}.kv_a_layernorm.weight"),
            key_up=expand[:, : config.qk_nope_dim].contiguous(),
            value_up=expand[:, config.qk_nope_dim :].transpose(1, 2).contiguous(),
            out=self.matrix(f"{at}.o_proj"),
        )

    def _mlp(self, at: str) -> Mlp:
        return Mlp(gate_up=self.matrix(f"{at}.gate_proj", f"{at}.up_proj"), down=self.matrix(f"{at}.down_proj"))

    def _moe(self, index: int) -> Moe:
        at = f"model.layers.{index}.block_sparse_moe"
        latent = self.config.latent_size is not None
        experts = range(self.config.num_experts)
        return Moe(
            router=self.matrix(f"{at}.gate"),
            bias=self.vector(f"{at}.gate.e_score_correction_bias"),
            latent_down=self.matrix(f"{at}.routed_expert_down_proj") if latent else None,
            latent_up=self.matrix(f"{at}.routed_expert_up_proj") if latent else None,
            norm=self.vector(f"{at}.routed_expert_norm.weight") if latent else None,
            gate_up=tuple(self._expert(index, expert, "w1", "w3") for expert in experts),
            down=tuple(self._expert(index, expert, "w2") for expert in experts),
            shared=self._mlp(f"{at}.shared_experts"),
        )

    def _expert(self, layer: int, index: int, *matrices: str) -> Matrix:
        stored = [self.weights.expert(layer, index, matrix) for matrix in matrices]
        plain = [dequantize(w.packed, w.scale) if isinstance(w, PackedTensor) else w for w in stored]
        return prepare(*plain, row_multiple=self.row_multiple)


def gated_unit(config: ModelConfig) -> Glu:
    """The activation of dense, shared and routed MLPs: of (gate, up)."""
    if config.activation == "silu":
        return pointwise.silu_glu
    assert config.situ_beta is not None and config.situ_linear_beta is not None
    beta, linear_beta = config.situ_beta, config.situ_linear_beta
    return lambda gate, up: pointwise.situ_glu(gate, up, beta, linear_beta)
