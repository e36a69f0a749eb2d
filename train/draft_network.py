"""The drafter, batched and differentiable: the twin of `model.drafter.network` that training uses.

Context rows are made once a sequence; the blocks of all its anchors then attend to the rows before their anchor and
to themselves, in one masked pass. Parameters stand under the checkpoint's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from model.drafter.config import DrafterConfig
from model.drafter.rotary import attention_scale, rotate
from model.drafter.tensors import expected_tensors
from model.ops.norm import rms_norm
from train.draft_attention import attend

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
BIGRAM_PRIOR = 4.0  # pseudo-counts, spread as the tokens are, that a row of bigrams starts with
# What each head adds to the score of the row before the block, against one far away; the last goes by content.
RECENCY = (10.0, 6.0, 2.5)
RECENCY_PAIRS = 8  # of the rotary pairs, the fastest: the others turn too slowly to tell near from far
QUERY_BIAS = 4.0  # of the one query latent that starts as a constant, where the others are near 1
BIGRAM_SHARE = 0.5  # of the bigrams' log-odds that the Markov head starts as: the block knows most of it too


class DraftNetwork:
    """`embedding` [vocab, hidden] is the target's, and frozen. DSpark's form only."""

    def __init__(self, config: DrafterConfig, embedding: Tensor) -> None:
        if config.form != "dspark" or not config.confidence_sees_markov:
            raise ValueError("only DSpark's form with a confidence head that sees the Markov head can be trained")
        self.config, self._embedding = config, embedding.float()

    def hidden(
        self, params: Mapping[str, Tensor], taps: Tensor, anchors: Tensor, places: Tensor, slots: int
    ) -> Tensor:
        """What lm_head is applied to: [sequences, anchors, slots, hidden].

        Shapes: taps [sequences, tokens, num_taps, hidden], padded at the end; anchors, places [sequences, anchors]:
        the token that each block starts with and its position, which is how many rows it sees.
        """
        c = self.config
        features = rms_norm(
            F.linear(taps.flatten(2), params["context_proj.weight"]), params["context_norm.weight"], c.eps
        )
        ids = torch.full((*anchors.shape, slots), c.mask_id)
        ids[..., 0] = anchors
        h = self._embedding[ids]
        positions = places[..., None] + torch.arange(slots)
        for layer in range(c.layers):
            at = f"layers.{layer}."
            p = {name.removeprefix(at): value for name, value in params.items() if name.startswith(at)}
            x = rms_norm(h, p["input_layernorm.weight"], c.eps)
            h = h + self._attend(p, x, positions, features, places)
            x = rms_norm(h, p["post_attention_layernorm.weight"], c.eps)
            gate, up = F.linear(x, p["mlp.gate_proj.weight"]), F.linear(x, p["mlp.up_proj.weight"])
            h = h + F.linear(F.silu(gate) * up, p["mlp.down_proj.weight"])
        return rms_norm(h, params["final_norm.weight"], c.eps)

    def _rows(self, p: Mapping[str, Tensor], x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, values [sequences, heads, n, ..] of tokens x [sequences, n, hidden] at positions [sequences, n]."""
        c = self.config
        heads = (*x.shape[:2], c.heads, -1)
        latent, key = F.linear(x, p["self_attn.kv_a_proj_with_mqa.weight"]).split_with_sizes(
            (c.kv_lora, c.rope.dim), -1
        )
        latent = rms_norm(latent, p["self_attn.kv_a_layernorm.weight"], c.eps)
        turned = rotate(key.flatten(0, 1), positions.flatten(), c.rope, interleaved=True).view_as(key)
        up = F.linear(latent, p["self_attn.kv_b_proj.weight"]).view(heads)
        plain, value = up.split_with_sizes((c.nope, c.v_dim), -1)
        turned = turned.to(plain.dtype)[:, :, None].expand(-1, -1, c.heads, -1)
        keys = torch.cat([plain, turned], -1)
        return keys.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()

    def _attend(
        self, p: Mapping[str, Tensor], x: Tensor, positions: Tensor, features: Tensor, places: Tensor
    ) -> Tensor:
        c = self.config
        sequences, anchors, slots, _ = x.shape
        x, positions = x.flatten(1, 2), positions.flatten(1)
        query = rms_norm(F.linear(x, p["self_attn.q_a_proj.weight"]), p["self_attn.q_a_layernorm.weight"], c.eps)
        query = F.linear(query, p["self_attn.q_b_proj.weight"]).view(*x.shape[:2], c.heads, -1)
        plain, turned = query.split_with_sizes((c.nope, c.rope.dim), -1)
        turned = rotate(turned.flatten(0, 1), positions.flatten(), c.rope, interleaved=True).view_as(turned)
        query = torch.cat([plain, turned.to(plain.dtype)], -1).transpose(1, 2)
        query = query.contiguous() * attention_scale(c.rope, c.nope + c.rope.dim)
        every = torch.arange(features.shape[1]).expand(features.shape[:2])
        keys, values = self._rows(p, features, every)
        blocks = (sequences, c.heads, anchors, slots, -1)
        own_keys, own_values = (part.view(blocks) for part in self._rows(p, x, positions))
        mixed = attend(query.view(blocks), keys, values, own_keys, own_values, places).flatten(2, 3)
        out = F.linear(mixed.transpose(1, 2).flatten(2), p["self_attn.o_proj.weight"])
        return out.view(sequences, anchors, slots, -1)


def initial(config: DrafterConfig, norm: Tensor, seed: int) -> dict[str, Tensor]:
    """Parameters to start from, before anything is known of the target's text.

    Blocks add little at first, the context is mostly the last tap, and `norm` [hidden] is the target's last.
    """
    rng = torch.Generator().manual_seed(seed)
    params: dict[str, Tensor] = {}
    for name, spec in expected_tensors(config).items():
        value = torch.randn(spec.shape, generator=rng) * spec.shape[-1] ** -0.5
        if len(spec.shape) == 1:
            value = torch.ones(spec.shape)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            value *= 0.1
        params[name] = value
    params["context_proj.weight"] *= 0.5
    params["context_proj.weight"][:, -config.hidden :] += torch.eye(config.hidden)
    params["final_norm.weight"] = norm.float().clone()
    params[CONFIDENCE] = torch.zeros_like(params[CONFIDENCE])
    params[CONFIDENCE_BIAS] = torch.zeros(1)
    params[W2] *= 0.1
    return params


@torch.no_grad()
def widen(params: dict[str, Tensor], smaller: Mapping[str, Tensor]) -> None:
    """Make `params`, fresh from `initial`, the function that `smaller` is, in place: of a matrix with more rows or
    columns the first are the smaller one's, and what the others feed is read with weight 0 at first."""
    read = (CONFIDENCE, W2)  # columns of the Markov head's rank; and those of the wider MLP
    for name, value in params.items():
        known = smaller[name].float()
        if name in read or name.endswith("down_proj.weight"):
            value.zero_()
        value[tuple(slice(0, size) for size in known.shape)] = known


@torch.no_grad()
def look_back(config: DrafterConfig, params: dict[str, Tensor], taps: Tensor, embedded: Tensor) -> None:
    """Make the first heads of every layer attend to the latest rows from the start, in place.

    Found by training alone, that takes most of a short run. A score needs something constant on both sides to turn:
    the mean direction of the context's features and of the block's inputs serve.
    Shapes: taps [tokens, num_taps, hidden]; embedded [tokens, hidden]: embeddings of some tokens and the mask's.
    """
    c, pairs = config, range(0, 2 * RECENCY_PAIRS, 2)
    features = rms_norm(
        F.linear(taps.flatten(1), params["context_proj.weight"]), params["context_norm.weight"], c.eps
    )
    along, query = features.mean(0), rms_norm(embedded, torch.ones(c.hidden), c.eps).mean(0)
    for layer in range(c.layers):
        at = f"layers.{layer}.self_attn."
        params[f"{at}q_a_proj.weight"][0] = QUERY_BIAS * query / (query @ query)
        keys = params[f"{at}kv_a_proj_with_mqa.weight"][c.kv_lora :]
        keys *= 0.3
        queries = params[f"{at}q_b_proj.weight"].view(c.heads, c.nope + c.rope.dim, c.q_lora)
        for pair in pairs:
            keys[pair] = along / (along @ along)
            for head, score in enumerate(RECENCY[: c.heads - 1]):
                size = score / (RECENCY_PAIRS * attention_scale(c.rope, c.nope + c.rope.dim))
                queries[head, c.nope + pair, 0] = size / QUERY_BIAS


def bigram_factors(counts: NDArray[Any], rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """w1, w2 [vocab, rank] with w1 @ w2.T near BIGRAM_SHARE of log p(next | token) - log p(next).

    The error is weighted by how often both occur, so that the rank goes where the tokens are.
    """
    pairs = torch.from_numpy(np.asarray(counts, np.float32))
    before, after = pairs.sum(1), pairs.sum(0) + 0.5
    share = after / after.sum()
    odds = ((pairs + BIGRAM_PRIOR * share) / ((before + BIGRAM_PRIOR)[:, None] * share)).log_()
    left, right = (before + 1).sqrt(), after.sqrt()
    torch.manual_seed(seed)
    u, s, v = torch.svd_lowrank(odds * left[:, None] * right, q=rank, niter=3)
    root = (BIGRAM_SHARE * s).sqrt()
    return u * root / left[:, None], v * root / right[:, None]
