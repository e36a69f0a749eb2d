"""Hand a checkpoint's tensors to the C++ model, joined the way its passes want them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Protocol

import torch

from model.errors import ModelError
from model.native.ffi import Join, Kind, MatrixSlot, NetworkShape, Source, VectorSlot

if TYPE_CHECKING:
    from model.checkpoint import PackedTensor
    from model.config import ModelConfig

KINDS = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16}
GLOBAL = -1


def network_shape(config: ModelConfig) -> NetworkShape:
    """The numbers that network.h calls Config; 0 where a part is absent."""
    bound = config.gate_lower_bound
    return NetworkShape(
        vocab=config.vocab_size, hidden=config.hidden_size, num_layers=config.num_layers, heads=config.num_heads,
        q_lora=config.q_lora_rank or 0, kv_lora=config.kv_lora_rank, nope=config.qk_nope_dim, rope=config.qk_rope_dim,
        v_dim=config.v_dim, mla_gate=config.mla_output_gate, kda_heads=config.kda_heads, key_dim=config.kda_head_dim,
        value_dim=config.kda_head_dim, conv_kernel=config.conv_kernel, gate_rank=config.kda_head_dim,
        full_rank_gate=config.kda_full_rank_gate, bounded_gate=bound is not None,
        dense_inter=config.intermediate_size, experts=config.num_experts, top_k=config.experts_per_token,
        shared_inter=config.shared_intermediate_size, expert_inter=config.expert_intermediate_size,
        latent=config.latent_size or 0, renormalize=config.renormalize, res_block=config.attn_res_block_size or 0,
        situ=config.activation == "situ", eps=config.rms_norm_eps, lora_eps=config.lora_norm_eps,
        l2_eps=config.qk_l2_eps, gate_bound=bound or 0.0, beta=config.situ_beta or 0.0,
        linear_beta=config.situ_linear_beta or 0.0, routed_scale=config.routed_scaling_factor,
    )  # fmt: skip


class WeightSource(Protocol):
    """What is needed of `model.checkpoint.Weights`."""

    def __getitem__(self, name: str) -> torch.Tensor: ...
    def expert(self, layer: int, index: int, matrix: str) -> torch.Tensor | PackedTensor: ...


class Loader:
    """Packs every weight of one checkpoint into one C++ model. Tensors are read once and not kept."""

    def __init__(self, lib: ctypes.CDLL, handle: int, config: ModelConfig, weights: WeightSource) -> None:
        self.lib, self.handle, self.config, self.weights = lib, handle, config, weights

    def load(self) -> torch.Tensor:
        """Load everything; return the embedding table, which the model reads in place and the caller keeps alive."""
        for layer in range(self.config.num_layers):
            self._vector(layer, VectorSlot.IN_NORM, self._name(layer, "input_layernorm.weight"))
            self._vector(layer, VectorSlot.POST_NORM, self._name(layer, "post_attention_layernorm.weight"))
            if self.config.attn_res_block_size is not None:
                self._residual_mix(layer, VectorSlot.ATTN_RES, self._name(layer, "self_attention_res"))
                self._residual_mix(layer, VectorSlot.FFN_RES, self._name(layer, "mlp_res"))
            if self.config.is_mla(layer):
                self._mla(layer)
            else:
                self._kda(layer)
            if layer < self.config.dense_layers:
                self._dense(layer)
            else:
                self._moe(layer)
        self._matrix(GLOBAL, MatrixSlot.HEAD, ["lm_head.weight"])
        self._vector(GLOBAL, VectorSlot.FINAL_NORM, "model.norm.weight")
        if self.config.attn_res_block_size is not None:
            self._residual_mix(GLOBAL, VectorSlot.FINAL_RES, "model.output_attn_res")
        table = self.weights["model.embed_tokens.weight"]
        self.lib.mr_embedding(self.handle, table.data_ptr(), kind_of(table))
        if self.lib.mr_check(self.handle):
            raise ModelError(f"the weights do not fit the config: {self.lib.mr_error().decode()}")
        return table

    def _name(self, layer: int, rest: str) -> str:
        return f"model.layers.{layer}.{rest}"

    def _attention(self, layer: int, *names: str) -> list[str]:
        return [self._name(layer, f"self_attn.{name}.weight") for name in names]

    def _kda(self, layer: int) -> None:
        gate = "g_proj" if self.config.kda_full_rank_gate else "g_a_proj"
        projections = self._attention(layer, "q_proj", "k_proj", "v_proj", gate, "f_a_proj", "b_proj")
        self._matrix(layer, MatrixSlot.ATTN_IN, projections)
        self._matrix(layer, MatrixSlot.DECAY, self._attention(layer, "f_b_proj"))
        if not self.config.kda_full_rank_gate:
            self._matrix(layer, MatrixSlot.GATE_B, self._attention(layer, "g_b_proj"))
        self._matrix(layer, MatrixSlot.ATTN_OUT, self._attention(layer, "o_proj"))
        for slot, stream in ((VectorSlot.CONV_Q, "q"), (VectorSlot.CONV_K, "k"), (VectorSlot.CONV_V, "v")):
            taps = self.weights[self._name(layer, f"self_attn.{stream}_conv1d.weight")]
            self._floats(layer, slot, taps[:, 0, :].T)  # [tap][channel]: the kernel runs along channels
        rate = self.weights[self._name(layer, "self_attn.A_log")].double().exp()
        self._floats(layer, VectorSlot.DECAY_RATE, rate)
        self._vector(layer, VectorSlot.DECAY_BIAS, self._name(layer, "self_attn.dt_bias"))
        self._vector(layer, VectorSlot.OUT_NORM, self._name(layer, "self_attn.o_norm.weight"))

    def _mla(self, layer: int) -> None:
        config = self.config
        q = "q_proj" if config.q_lora_rank is None else "q_a_proj"
        gate = ["g_proj"] if config.mla_output_gate else []
        self._matrix(layer, MatrixSlot.ATTN_IN, self._attention(layer, q, "kv_a_proj_with_mqa", *gate))
        if config.q_lora_rank is not None:
            self._matrix(layer, MatrixSlot.Q_B, self._attention(layer, "q_b_proj"))
            self._vector(layer, VectorSlot.QA_NORM, *self._attention(layer, "q_a_layernorm"))
        self._vector(layer, VectorSlot.KV_NORM, *self._attention(layer, "kv_a_layernorm"))
        self._matrix(layer, MatrixSlot.ATTN_OUT, self._attention(layer, "o_proj"))
        # kv_b holds, per head, W_UK [nope, latent] then W_UV [v, latent]; absorbed attention wants W_UK transposed.
        kv_b = self.weights[self._attention(layer, "kv_b_proj")[0]]
        for head in torch.split(kv_b, config.qk_nope_dim + config.v_dim):
            self._pack(layer, MatrixSlot.KEY_UP, [source_of(head[: config.qk_nope_dim].T)], Join.ROWS)
            self._pack(layer, MatrixSlot.VALUE_UP, [source_of(head[config.qk_nope_dim :])], Join.ROWS)

    def _dense(self, layer: int) -> None:
        gate, up, down = (self._name(layer, f"mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
        self._matrix(layer, MatrixSlot.DENSE_IN, [gate, up], Join.GLU)
        self._matrix(layer, MatrixSlot.DENSE_OUT, [down])

    def _moe(self, layer: int) -> None:
        def name(rest: str) -> str:
            return self._name(layer, f"block_sparse_moe.{rest}.weight")

        latent = self.config.latent_size is not None
        down, up = name("routed_expert_down_proj"), name("routed_expert_up_proj")
        self._matrix(layer, MatrixSlot.FFN_IN, [name("gate"), *([down] if latent else [])])
        bias = self._name(layer, "block_sparse_moe.gate.e_score_correction_bias")
        self._vector(layer, VectorSlot.ROUTER_BIAS, bias)
        shared_gate, shared_up, shared_down = (name(f"shared_experts.{p}_proj") for p in ("gate", "up", "down"))
        self._matrix(layer, MatrixSlot.SHARED_IN, [shared_gate, shared_up], Join.GLU)
        self._matrix(layer, MatrixSlot.FFN_OUT, [*([up] if latent else []), shared_down], Join.COLUMNS)
        if latent:
            self._vector(layer, VectorSlot.ROUTED_NORM, name("routed_expert_norm"))
        for expert in range(self.config.num_experts):
            w1, w2, w3 = (self.weights.expert(layer, expert, part) for part in ("w1", "w2", "w3"))
            self._pack(layer, MatrixSlot.EXPERT_IN, [source_of(w1), source_of(w3)], Join.GLU)
            self._pack(layer, MatrixSlot.EXPERT_OUT, [source_of(w2)], Join.ROWS)

    def _matrix(self, layer: int, slot: MatrixSlot, names: list[str], join: Join = Join.ROWS) -> None:
        self._pack(layer, slot, [source_of(self.weights[name]) for name in names], join)

    def _pack(self, layer: int, slot: MatrixSlot, parts: list[tuple[Source, object]], join: Join) -> None:
        # The second of each pair keeps the tensor's memory alive until the call returns.
        array = (Source * len(parts))(*(source for source, _ in parts))
        if self.lib.mr_pack(self.handle, layer, slot, array, len(parts), join):
            raise MemoryError(f"layer {layer}, {slot.name}: {self.lib.mr_error().decode()}")

    def _vector(self, layer: int, slot: VectorSlot, name: str) -> None:
        self._floats(layer, slot, self.weights[name])

    def _residual_mix(self, layer: int, slot: VectorSlot, prefix: str) -> None:
        """Scores are taken on normed vectors, so the norm's weight and the projection act as one vector."""
        norm, proj = self.weights[f"{prefix}_norm.weight"], self.weights[f"{prefix}_proj.weight"]
        self._floats(layer, slot, norm.float() * proj.float()[0])

    def _floats(self, layer: int, slot: VectorSlot, values: torch.Tensor) -> None:
        data = values.float().contiguous()
        if self.lib.mr_vector(self.handle, layer, slot, data.data_ptr(), data.numel()):
            raise MemoryError(f"layer {layer}, {slot.name}: {self.lib.mr_error().decode()}")


def kind_of(tensor: torch.Tensor) -> Kind:
    """Raises: ModelError."""
    kind = KINDS.get(tensor.dtype)
    if kind is None:
        raise ModelError(f"expected weights of {[str(t) for t in KINDS]}, found {tensor.dtype}")
    return kind


def source_of(weight: torch.Tensor | PackedTensor) -> tuple[Source, object]:
    """Describe one [out, in] weight, strided or packed; the second value owns its memory."""
    if isinstance(weight, torch.Tensor):
        rows, cols = weight.shape
        return Source(weight.data_ptr(), None, kind_of(weight), rows, cols, *weight.stride()), weight
    rows, half = weight.packed.shape
    packed = Source(weight.packed.data_ptr(), weight.scale.data_ptr(), Kind.MX, rows, 2 * half, 2 * half, 1)
    return packed, weight
