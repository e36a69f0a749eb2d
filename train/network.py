"""K3's text network for training: all positions at once, with gradients, configured by the checkpoint's config.json.

Parameters are a flat dict under the checkpoint's names without `language_model.`; a layer's routed experts are kept
stacked as `experts.w13` [E, 2I, latent] and `experts.w2` [E, latent, I].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train import kda
from train.attention import causal_attention
from train.experts import grouped_mm, permute_rows

NORM_EPS = 1e-5
LORA_NORM_EPS = 1e-6
L2_EPS = 1e-6

Params = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers of `text_config` that the network's arithmetic depends on."""

    vocab: int
    hidden: int
    layers: int
    full_layers: frozenset[int]  # 0-based
    block: int
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    kda_heads: int
    kda_dim: int
    lower_bound: float
    dense_width: int
    experts: int
    top_k: int
    shared_width: int
    expert_width: int
    latent: int
    beta: float
    linear_beta: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        text = config["text_config"]
        linear = text["linear_attn_config"]
        return cls(
            vocab=text["vocab_size"],
            hidden=text["hidden_size"],
            layers=text["num_hidden_layers"],
            full_layers=frozenset(layer - 1 for layer in linear["full_attn_layers"]),
            block=text["attn_res_block_size"],
            heads=text["num_attention_heads"],
            q_lora=text["q_lora_rank"],
            kv_lora=text["kv_lora_rank"],
            nope=text["qk_nope_head_dim"],
            rope=text["qk_rope_head_dim"],
            v_dim=text["v_head_dim"],
            kda_heads=linear["num_heads"],
            kda_dim=linear["head_dim"],
            lower_bound=linear["gate_lower_bound"],
            dense_width=text["intermediate_size"],
            experts=text["num_experts"],
            top_k=text["num_experts_per_token"],
            shared_width=text["num_shared_experts"] * text["moe_intermediate_size"],
            expert_width=text["moe_intermediate_size"],
            latent=text["routed_expert_hidden_size"],
            beta=text["activation_situ_beta"],
            linear_beta=text["activation_situ_linear_beta"],
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float = NORM_EPS) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def tanh(x: Tensor) -> Tensor:
    """tanh by way of exp, three times as fast here; its absolute error of 1e-7 is far below a weight's rounding."""
    return 2.0 * torch.sigmoid(2.0 * x) - 1.0


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    return beta * tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * tanh(up / linear_beta))


def mix_and_norm(sources: list[Tensor], score_weight: Tensor, norm_weight: Tensor) -> Tensor:
    """Attention over the residual blocks and the running sum, then the sublayer's RMSNorm. Sources [B,T,D]."""
    if len(sources) == 1:
        return rms_norm(sources[0], norm_weight)
    scores = [
        (source * score_weight).sum(-1, keepdim=True) * torch.rsqrt(source.square().mean(-1, keepdim=True) + NORM_EPS)
        for source in sources
    ]
    weights = torch.softmax(torch.cat(scores, -1), -1)
    mixed = sum(source * weights[..., i : i + 1] for i, source in enumerate(sources))
    assert isinstance(mixed, Tensor)
    return rms_norm(mixed, norm_weight)


def kda_attention(x: Tensor, p: Params, s: Shape) -> Tensor:
    """One KDA layer's attention on normed input [B,T,hidden]."""
    batch, length, _ = x.shape
    heads, dim = s.kda_heads, s.kda_dim
    width = heads * dim
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
    projected = F.linear(x, torch.cat([p[f"{name}.weight"] for name in names]))
    qkv, gate, low, beta = torch.split(projected, [3 * width, width, dim, heads], -1)
    taps = torch.cat([p[f"{name}_conv1d.weight"] for name in "qkv"])[:, 0]  # [3*width, 4], oldest first
    padded = F.pad(qkv, (0, 0, 3, 0))
    convolved = F.silu(
        sum((padded[:, j : j + length] * taps[:, j] for j in range(1, 4)), padded[:, :length] * taps[:, 0])
    )
    q, k, v = (part.view(batch, length, heads, dim) for part in torch.split(convolved, width, -1))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * dim**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
    z = (F.linear(low, p["f_b_proj.weight"]) + p["dt_bias"]).view(batch, length, heads, dim)
    g = s.lower_bound * torch.sigmoid(p["A_log"][:heads, None].exp() * z)
    pad = -length % kda.TILE
    if pad:
        q, k, v, g = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (q, k, v, g))
        beta = F.pad(beta, (0, 0, 0, pad))
    out = kda.tiled(q, k, v, g, torch.sigmoid(beta))[:, :length]
    out = rms_norm(out, p["o_norm.weight"]) * torch.sigmoid(gate).view(batch, length, heads, dim)
    return F.linear(out.reshape(batch, length, width), p["o_proj.weight"])


def mla_attention(x: Tensor, first: Tensor, p: Params, s: Shape) -> Tensor:
    """One gated MLA layer's attention on normed input [B,T,hidden]; no rotation anywhere."""
    batch, length, _ = x.shape
    names = ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")
    projected = F.linear(x, torch.cat([p[f"{name}.weight"] for name in names]))
    q_low, latent, shared, gate = torch.split(projected, [s.q_lora, s.kv_lora, s.rope, s.heads * s.v_dim], -1)
    q = F.linear(rms_norm(q_low, p["q_a_layernorm.weight"], LORA_NORM_EPS), p["q_b_proj.weight"])
    kv = F.linear(rms_norm(latent, p["kv_a_layernorm.weight"], LORA_NORM_EPS), p["kv_b_proj.weight"])
    q = q.view(batch, length, s.heads, s.nope + s.rope).transpose(1, 2)
    kv = kv.view(batch, length, s.heads, s.nope + s.v_dim).transpose(1, 2)
    k_nope, v = torch.split(kv, [s.nope, s.v_dim], -1)
    k = torch.cat([k_nope, shared[:, None].expand(-1, s.heads, -1, -1)], -1)
    out, _ = causal_attention(q.contiguous(), k, v.contiguous(), first)
    out = out.transpose(1, 2).reshape(batch, length, s.heads * s.v_dim) * torch.sigmoid(gate)
    return F.linear(out, p["o_proj.weight"])


def gated_mlp(x: Tensor, p: Params, prefix: str, s: Shape) -> Tensor:
    hidden = F.linear(x, torch.cat([p[f"{prefix}gate_proj.weight"], p[f"{prefix}up_proj.weight"]]))
    gate, up = hidden.chunk(2, -1)
    return F.linear(situ(gate, up, s.beta, s.linear_beta), p[f"{prefix}down_proj.weight"])


def latent_moe(x: Tensor, p: Params, s: Shape) -> tuple[Tensor, Tensor]:
    """Routed experts in the latent width plus the shared MLP; also the tokens each expert got, int64 [E]."""
    shape = x.shape
    x = x.reshape(-1, s.hidden)
    projected = F.linear(x, torch.cat([p["routed_expert_down_proj.weight"], p["gate.weight"]]))
    low, logits = torch.split(projected, [s.latent, s.experts], -1)
    affinity = torch.sigmoid(logits)
    chosen = torch.topk(affinity.detach() + p["gate.e_score_correction_bias"], s.top_k, -1).indices
    weights = affinity.gather(1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    inverse = torch.argsort(order)
    counts = (flat[:, None] == torch.arange(s.experts)).sum(0)
    rows = low[:, None].expand(-1, s.top_k, -1).reshape(-1, s.latent)
    gate, up = grouped_mm(permute_rows(rows, order, inverse), p["experts.w13"], counts).chunk(2, -1)
    rows = grouped_mm(situ(gate, up, s.beta, s.linear_beta), p["experts.w2"], counts)
    rows = permute_rows(rows, inverse, order).view(-1, s.top_k, s.latent)
    routed = rms_norm((rows * weights[..., None]).sum(1), p["routed_expert_norm.weight"])
    out = F.linear(routed, p["routed_expert_up_proj.weight"]) + gated_mlp(x, p, "shared_experts.", s)
    return out.view(shape), counts


def _under(params: Params, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}


class Network:
    """The forward pass; `compiled` fuses each kind of sublayer once for all layers of that kind."""

    def __init__(self, shape: Shape, *, compiled: bool = False) -> None:
        self.shape = shape
        wrap: Callable[..., Any] = torch.compile if compiled else lambda function: function
        self._mix = wrap(mix_and_norm)
        self._kda = wrap(kda_attention)
        self._mla = wrap(mla_attention)
        self._moe = wrap(latent_moe)
        self._dense = wrap(gated_mlp)

    def hidden(self, params: Params, ids: Tensor, first: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(normed hidden states [B,T,hidden] before lm_head, tokens per expert of each MoE layer).

        `first` [B,T]: the earliest position that the MLA layers of a position may see (its document's start).
        """
        s = self.shape
        blocks: list[Tensor] = []
        counts: list[Tensor] = []
        running = F.embedding(ids, params["model.embed_tokens.weight"])
        for layer in range(s.layers):
            p = _under(params, f"model.layers.{layer}.")
            x = self._mix([*blocks, running], _score(p, "self_attention_res"), p["input_layernorm.weight"])
            starts_block = layer % s.block == 0
            if starts_block:
                blocks.append(running)
            attention = _under(p, "self_attn.")
            if layer in s.full_layers:
                out = self._mla(x, first, attention, s)
            else:
                out = self._kda(x, attention, s)
            running = out if starts_block else running + out
            x = self._mix([*blocks, running], _score(p, "mlp_res"), p["post_attention_layernorm.weight"])
            if layer == 0:
                out = self._dense(x, _under(p, "mlp."), "", s)
            else:
                out, count = self._moe(x, _under(p, "block_sparse_moe."), s)
                counts.append(count)
            running = running + out
        final = _score({k.removeprefix("model."): v for k, v in params.items() if "output" in k}, "output_attn_res")
        return self._mix([*blocks, running], final, params["model.norm.weight"]), counts

    def logits(self, params: Params, ids: Tensor) -> Tensor:
        """All logits [B,T,vocab] of whole sequences."""
        return F.linear(self.hidden(params, ids, torch.zeros_like(ids))[0], params["lm_head.weight"])


def _score(p: Params, name: str) -> Tensor:
    """The folded vector that scores a residual source: norm weight times projection."""
    return p[f"{name}_norm.weight"] * p[f"{name}_proj.weight"][0]
