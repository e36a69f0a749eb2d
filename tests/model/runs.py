"""Backends over the golden models, and the ways to feed them a prompt."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from model.backend import load_backend
from model.batch import Backend, PoolLayout, Segment
from model.errors import BackendUnavailable
from tests.golden import golden_dir

BLOCK_TOKENS = 64
KINDS = ("torch", "native")


@cache
def backend(name: str, kind: str) -> Backend:
    """Native may be missing only where there is no compiler to build it with."""
    try:
        return load_backend(golden_dir(name), kind=kind, threads=1, numerics="invariant")
    except BackendUnavailable as error:
        assert kind == "native" and not any(map(shutil.which, ("c++", "g++", "clang++"))), error
        pytest.skip(str(error))


class Pools:
    """Row and state pools poisoned with NaN: whatever is read before it is written shows."""

    def __init__(self, layout: PoolLayout, num_slots: int, num_blocks: int, seed: int = 0) -> None:
        self.layout = layout
        self.rows = torch.full((num_blocks, layout.block_floats), float("nan"))
        self.state = torch.full((num_slots, layout.slot_floats), float("nan"))
        self._free = random.Random(seed).sample(range(num_blocks), num_blocks)

    def take(self, tokens: int) -> list[int]:
        """Enough blocks for a sequence, in no order."""
        return [self._free.pop() for _ in range(-(-tokens // self.layout.block_tokens))]

    def rows_of(self, blocks: Sequence[int], tokens: int) -> torch.Tensor:
        """[mla_layers, tokens, width]"""
        layout = self.layout
        rows = self.rows.view(-1, layout.num_mla_layers, layout.block_tokens, layout.row_width)[list(blocks)]
        return rows.transpose(0, 1).flatten(1, 2)[:, :tokens]

    def recurrent_of(self, slot: int) -> torch.Tensor:
        """[kda_layers, heads, K, V]"""
        layout = self.layout
        shape = (layout.num_kda_layers, layout.num_heads, layout.key_dim, layout.value_dim)
        return self.state[slot, : layout.recurrent_floats].view(shape)

    def conv_of(self, slot: int) -> torch.Tensor:
        """[kda_layers, q|k|v, history, channels]"""
        layout = self.layout
        shape = (layout.num_kda_layers, 3, layout.conv_history, layout.num_heads * layout.key_dim)
        return self.state[slot, layout.recurrent_floats :].view(shape)


@dataclass(frozen=True)
class Result:
    """What a run left: logits [tokens, vocab] per prompt, and the pools."""

    logits: list[torch.Tensor]
    pools: Pools
    blocks: list[list[int]]


def run(engine: Backend, prompts: Sequence[Sequence[int]], tokens_per_pass: int, **forward: Any) -> Result:
    """Feed all prompts side by side, each pass taking the next tokens of every prompt that still has some."""
    pools = Pools(engine.layout(BLOCK_TOKENS), len(prompts) + 1, sum(-(-len(p) // BLOCK_TOKENS) for p in prompts) + 1)
    blocks = [pools.take(len(prompt)) for prompt in prompts]
    pieces: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), tokens_per_pass):
        running = [i for i, prompt in enumerate(prompts) if start < len(prompt)]
        segments = [
            Segment(
                ids=prompts[i][start : start + tokens_per_pass],
                start=start,
                slot=len(prompts) - i,
                blocks=blocks[i],
                logits="all",
            )
            for i in running
        ]
        out = engine.forward(segments, pools.rows, pools.state, **forward)
        for i, logits in zip(running, out.split([len(s.ids) for s in segments]), strict=True):
            pieces[i].append(logits)
    return Result([torch.cat(piece) for piece in pieces], pools, blocks)
