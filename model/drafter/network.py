"""The draft network in eager torch, one sequence at a time: what every faster form must agree with.

A context token leaves one row in every layer, made from the target's taps alone, so rows can be cached, handed over
and written back like the target's own. A block then attends to the rows before its anchor and to itself, both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import xxhash

from model.checkpoint import load_tensors
from model.config import ModelConfig
from model.drafter.config import DrafterConfig, load_drafter_config
from model.drafter.rotary import attention_scale, rotate
from model.drafter.tensors import expected_tensors, unread_tensors
from model.ops.norm import rms_norm

Choose = Callable[[int, torch.Tensor], int]  # slot, logits [vocab] -> the token to draft there


@dataclass(frozen=True, slots=True)
class Draft:
    """tokens [n]; logits [n, vocab]: what each was chosen from; confidence [n]: that each is kept, given that those
    before it are, as the confidence head sees it, or None without one."""

    tokens: list[int]
    logits: torch.Tensor
    confidence: list[float] | None


class Drafter:
    """`embedding` and `lm_head` [vocab, hidden] are the target's."""

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
    ) -> None:
        self.config = config
        self._t = {name.removesuffix(".weight"): tensor.float() for name, tensor in tensors.items()}
        self._embedding, self._head = embedding, lm_head

    @torch.inference_mode()
    def context_rows(self, taps: torch.Tensor, start: int) -> torch.Tensor:
        """The rows of tokens at positions start, start + 1, ...: [layers, tokens, row_width] fp32.

        Shapes: taps [tokens, num_taps, hidden]: the target's raw running sum after each tapped layer.
        """
        c = self.config
        fc, norm = ("context_proj", "context_norm") if c.form == "dspark" else ("fc", "hidden_norm")
        features = rms_norm(F.linear(taps.flatten(1), self._t[fc]), self._t[norm], c.eps)
        positions = torch.arange(start, start + len(taps))
        return torch.stack([self._rows(layer, features, positions) for layer in range(c.layers)])

    @torch.inference_mode()
    def draft(
        self, anchor: int, position: int, rows: torch.Tensor, length: int, choose: Choose, *, first: int = 0
    ) -> Draft:
        """Propose `length` tokens to follow `anchor`, the token at `position`, which the target has not consumed.

        Shapes: rows [layers, position - first, row_width]: of the tokens [first, position).
        Source: DSpark, arXiv 2607.05147; DFlash, arXiv 2602.06036.
        """
        c = self.config
        if not 1 <= length <= c.block_len:
            raise ValueError(f"expected a draft of 1 to {c.block_len} tokens, not {length}")
        anchors = 0 if c.form == "dspark" else 1  # DSpark's slots predict the next token, DFlash's masks their own
        ids = torch.full((length + anchors,), c.mask_id)
        ids[0] = anchor
        hidden = self._block(ids, position, rows, first)[anchors:]
        logits = F.linear(hidden, self._head.float())
        tokens: list[int] = []
        confidence: list[float] = []
        for slot in range(length):
            before = tokens[-1] if tokens else anchor
            seen = hidden[slot]
            if c.markov_rank:
                markov = self._t["markov_head.markov_w1"][before]
                logits[slot] += F.linear(markov, self._t["markov_head.markov_w2"])
                seen = torch.cat([seen, markov]) if c.confidence_sees_markov else seen
            if c.confidence:
                score = F.linear(seen, self._t["confidence_head.proj"], self._t["confidence_head.proj.bias"])
                confidence.append(float(score.sigmoid()))
            tokens.append(choose(slot, logits[slot]))
        return Draft(tokens, logits, confidence if c.confidence else None)

    def _block(self, ids: torch.Tensor, position: int, rows: torch.Tensor, first: int) -> torch.Tensor:
        """[slots, hidden] after the last norm."""
        c = self.config
        if rows.shape != (c.layers, position - first, c.row_width):
            raise ValueError(f"expected rows {[c.layers, position - first, c.row_width]}, found {list(rows.shape)}")
        h = self._embedding[ids].float() * c.embedding_scale
        positions = torch.arange(position, position + len(ids))
        for layer in range(c.layers):
            at = f"layers.{layer}."
            x = rms_norm(h, self._t[f"{at}input_layernorm"], c.eps)
            h = h + self._attend(layer, x, positions, rows[layer])
            x = rms_norm(h, self._t[f"{at}post_attention_layernorm"], c.eps)
            gate, up = (F.linear(x, self._t[f"{at}mlp.{name}_proj"]) for name in ("gate", "up"))
            h = h + F.linear(F.silu(gate) * up, self._t[f"{at}mlp.down_proj"])
        return rms_norm(h, self._t["final_norm" if c.form == "dspark" else "norm"], c.eps)

    def _rows(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What tokens leave in a layer: [tokens, row_width]. DSpark: normed latent, rotated key; DFlash: k, v."""
        c, at = self.config, f"layers.{layer}.self_attn."
        if c.form == "dspark":
            latent, key = F.linear(x, self._t[f"{at}kv_a_proj_with_mqa"]).split_with_sizes(
                (c.kv_lora, c.rope.dim), -1
            )
            latent = rms_norm(latent, self._t[f"{at}kv_a_layernorm"], c.eps)
            return torch.cat([latent, rotate(key, positions, c.rope, interleaved=True)], -1)
        key = _heads(F.linear(x, self._t[f"{at}k_proj"]), c.kv_heads, c.head_dim)
        key = rotate(rms_norm(key, self._t[f"{at}k_norm"], c.eps), positions, c.rope, interleaved=False)
        return torch.cat([key.flatten(1), F.linear(x, self._t[f"{at}v_proj"])], -1)

    def _attend(self, layer: int, x: torch.Tensor, positions: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        c, at = self.config, f"layers.{layer}.self_attn."
        rows = torch.cat([context, self._rows(layer, x, positions)])
        if c.form == "dspark":
            query = rms_norm(F.linear(x, self._t[f"{at}q_a_proj"]), self._t[f"{at}q_a_layernorm"], c.eps)
            query = _heads(F.linear(query, self._t[f"{at}q_b_proj"]), c.heads, c.nope + c.rope.dim)
            plain, turned = query.split_with_sizes((c.nope, c.rope.dim), -1)
            query = torch.cat([plain, rotate(turned, positions, c.rope, interleaved=True)], -1)
            latent, shared = rows.split_with_sizes((c.kv_lora, c.rope.dim), -1)
            up = _heads(F.linear(latent, self._t[f"{at}kv_b_proj"]), c.heads, c.nope + c.v_dim)
            key, value = up.split_with_sizes((c.nope, c.v_dim), -1)
            key = torch.cat([key, shared[:, None].expand(-1, c.heads, -1)], -1)
            scale = attention_scale(c.rope, c.nope + c.rope.dim)
        else:
            query = _heads(F.linear(x, self._t[f"{at}q_proj"]), c.heads, c.head_dim)
            query = rotate(rms_norm(query, self._t[f"{at}q_norm"], c.eps), positions, c.rope, interleaved=False)
            key, value = (_heads(part, c.kv_heads, c.head_dim) for part in rows.chunk(2, -1))
            key, value = (part.repeat_interleave(c.heads // c.kv_heads, 1) for part in (key, value))
            scale = attention_scale(c.rope, c.head_dim)
        window = c.windows[layer]
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        if window is not None:
            begin = int(positions[-1]) + 1 - len(rows)
            apart = positions[:, None] - torch.arange(len(rows)) - begin
            scores = scores.masked_fill(apart.abs() >= window, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        return F.linear(mixed.flatten(1), self._t[f"{at}o_proj"])


def _heads(x: torch.Tensor, heads: int, width: int) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], heads, width)


def load_drafter(
    model_dir: Path,
    target: ModelConfig,
    embedding: torch.Tensor,
    lm_head: torch.Tensor,
    *,
    block_len: int | None = None,
) -> Drafter:
    """Raises: ModelError and its kinds, naming the file, the field or tensor, what was expected and found."""
    return Drafter(*read_drafter(model_dir, target, block_len=block_len), embedding, lm_head)


def read_drafter(
    model_dir: Path, target: ModelConfig, *, block_len: int | None = None
) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    """The config and the tensors, as they are stored, that the target does not have. Raises as `load_drafter`."""
    config = load_drafter_config(model_dir, target, block_len=block_len)
    unread = unread_tensors(config)
    tensors = load_tensors(model_dir, expected_tensors(config), unread)
    return config, {name: tensor for name, tensor in tensors.items() if name not in unread}


def drafter_id(config: DrafterConfig, tensors: Mapping[str, torch.Tensor], target_revision: str) -> str:
    """16 hex digits that name the rows: equal only for the same drafter on the same target."""
    digest = xxhash.xxh3_64(f"{config!r}{target_revision}".encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
