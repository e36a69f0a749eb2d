"""`NativeBackend`: the network in C++, behind `model.batch.Backend`."""

from __future__ import annotations

import ctypes
import threading
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from model.batch import Fold, PoolLayout, Segment
from model.errors import BackendUnavailable
from model.native import ffi, selfcheck
from model.native.build import build
from model.native.ffi import LOGITS_MODES, Clock, Op, Pass, load
from model.native.loader import Loader, network_shape
from moonrelay.errors import InvariantError

if TYPE_CHECKING:
    from model.config import ModelConfig
    from model.native.loader import WeightSource
    from model.progress import LayerProgress

WRONG_PASS = 2  # mr_forward: refused before anything was touched


class _Pools(NamedTuple):
    """Pools that were found to fit, not kept alive."""

    rows: weakref.ref[torch.Tensor]
    state: weakref.ref[torch.Tensor]
    shapes: tuple[torch.Size, torch.Size]
    layout: PoolLayout


class BatchError(InvariantError):
    """A batch that would read or write outside the pools, or twice. It was refused; rows and state are unchanged."""


@cache
def library() -> ctypes.CDLL:
    """Build if needed, load and check, once per process. Raises BackendUnavailable."""
    lib = load(build())
    found = selfcheck.digest(NativeBackend(selfcheck.CONFIG, selfcheck.PatternWeights(), lib=lib, widen_bytes=0))
    if found != selfcheck.DIGEST:
        isa = lib.mr_isa().decode()
        raise BackendUnavailable(f"the {isa} library computes {found} where {selfcheck.DIGEST} is right")
    return lib


class NativeBackend:
    """Runs the network on `threads` threads; results do not depend on their number, on batching or on chunking.

    Every output is one ordered chain of fused multiply-adds, the KDA recurrence goes token by token and attention is
    always absorbed, so prompt, decode, any cut and any resume agree bit for bit (`DESIGN.md`, Numerics).
    Raises BackendUnavailable (no compiler, a shape the C++ code does not take), ModelError (weights that do not fit).
    """

    name = "native"
    share_from_macs: float | None = None  # None: `kWorthSharing` in pool.h; 0 also shares out what is small
    cached_bytes: float | None = None  # None: `kCached` in network.h; 0 never shares out rows

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        threads: int = 1,
        *,
        lib: ctypes.CDLL | None = None,
        widen_bytes: float | None = None,
    ) -> None:
        self.config = config
        self.draft_width = 0
        self._num_taps = 0
        self._layouts: dict[tuple[int, int], PoolLayout] = {}
        self._checked: _Pools | None = None
        self._handle: int | None = None  # set first: __del__ runs even when the rest fails
        self._lib = lib or library()
        if config.num_shared_experts < 1 or not config.mla_layers:
            raise BackendUnavailable("the C++ backend needs an MLA layer and a shared expert")
        layers = range(config.num_layers)
        kinds = bytes(config.is_mla(layer) | (layer < config.dense_layers) << 1 for layer in layers)
        self._handle = self._lib.mr_create(ctypes.byref(network_shape(config)), kinds, threads)
        if not self._handle:
            raise BackendUnavailable(self._lib.mr_error().decode())
        if widen_bytes is not None:  # up to which MXFP4 experts are kept as bf16; None: `kWidenBytes` in network.h
            self._lib.mr_widen_up_to(self._handle, widen_bytes)
        self.embedding = Loader(self._lib, self._handle, config, weights).load()
        if self.share_from_macs is not None:
            self._lib.mr_share_from(self._handle, self.share_from_macs)
        if self.cached_bytes is not None:
            self._lib.mr_cached_up_to(self._handle, self.cached_bytes)
        self.lm_head = weights["lm_head.weight"]
        self._one_pass = threading.Lock()  # the C++ model's scratch serves one pass at a time

    def __del__(self) -> None:
        if self._handle:
            self._lib.mr_destroy(self._handle)

    @property
    def isa(self) -> str:
        """Which vectors the library was built for: avx512, avx2 or generic."""
        return str(self._lib.mr_isa().decode())

    @property
    def weight_bytes(self) -> int:
        """Packed weights, without the embedding table, which stays mapped from its file."""
        return int(self._lib.mr_weight_bytes(self._handle))

    def layout(self, block_tokens: int) -> PoolLayout:
        key = block_tokens, self.draft_width
        known = self._layouts.get(key)
        if known is None:
            known = replace(self.config.pool_layout(block_tokens), draft_width=self.draft_width)
            self._layouts[key] = known
        return known

    def tap(self, layers: Sequence[int]) -> None:
        """Choose the layers, ascending, whose running sums `forward` gives out in `taps`. Raises BatchError."""
        chosen = array("i", layers)
        if self._lib.mr_taps(self._handle, chosen.buffer_info()[0], len(chosen)):
            raise BatchError(self._lib.mr_error().decode())
        self._num_taps = len(chosen)

    def forward(
        self,
        segments: Sequence[Segment],
        rows: torch.Tensor,
        state: torch.Tensor,
        *,
        progress: LayerProgress | None = None,
        records: torch.Tensor | None = None,
        taps: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Backend.forward`. Raises BatchError (nothing touched) or MemoryError (rows and state undefined)."""
        layout = self._check_pools(rows, state)
        kept = self._records(records, layout)
        if taps is not None:
            expected = (sum(len(s.ids) for s in segments), self._num_taps, self.config.hidden_size)
            if not self._num_taps or taps.shape != expected or taps.dtype != torch.float32:
                raise BatchError(f"taps: expected fp32 {list(expected)}, found {list(taps.shape)}")
        try:
            arrays = _arrays(segments)
            record = array("i", [-1 if s.record is None else s.record for s in segments])
        except OverflowError as error:
            raise BatchError(f"an index is no 32-bit number: {error}") from error
        out = torch.empty((sum(s.num_logits() for s in segments), self.config.vocab_size))
        work = Pass(
            len(segments), *(a.buffer_info()[0] for a in arrays),
            rows.data_ptr(), *rows.shape, state.data_ptr(), *state.shape, layout.block_tokens, out.data_ptr(),
            None if progress is None else progress.address,
            record.buffer_info()[0], *kept, None if taps is None else taps.data_ptr(),
        )  # fmt: skip
        with self._one_pass:
            status = self._lib.mr_forward(self._handle, ctypes.byref(work))
        if status:
            raise (BatchError if status == WRONG_PASS else MemoryError)(self._lib.mr_error().decode())
        return out

    def fold(self, folds: Sequence[Fold], state: torch.Tensor, records: torch.Tensor) -> None:
        """Advance slots by what is kept of verified segments. Raises BatchError, and then nothing was touched."""
        work = (ffi.Fold * len(folds))(*(ffi.Fold(f.record, f.slot, f.first, f.tokens, f.start) for f in folds))
        layout = self.layout(1)
        with self._one_pass:
            status = self._lib.mr_fold(
                self._handle, work, len(folds), *self._records(records, layout), state.data_ptr(), *state.shape
            )
        if status:
            raise (BatchError if status == WRONG_PASS else MemoryError)(self._lib.mr_error().decode())

    def profile(self, clock: Clock) -> dict[str, float]:
        """Choose the clock that times operations; return the seconds spent in each since the last call."""
        seconds = (ctypes.c_double * len(Op))()
        self._lib.mr_profile(self._handle, clock, seconds)
        return {op.name.lower(): seconds[op] for op in Op}

    @staticmethod
    def _records(records: torch.Tensor | None, layout: PoolLayout) -> tuple[int | None, int, int, int]:
        """Address, number, floats of one, tokens of one."""
        if records is None:
            return (None, 0, 0, 0)
        tokens, rest = divmod(records.shape[1], layout.record_floats(1))
        if rest or tokens < 1 or records.dtype != torch.float32 or not records.is_contiguous():
            raise BatchError(f"records: expected contiguous fp32 of whole tokens, found {list(records.shape)}")
        return (records.data_ptr(), *records.shape, tokens)

    def _check_pools(self, rows: torch.Tensor, state: torch.Tensor) -> PoolLayout:
        """A serving process has two pools for life: what was found of them is not looked for in every pass."""
        known, shapes = self._checked, (rows.shape, state.shape)
        same = known is not None and known.rows() is rows and known.state() is state and known.shapes == shapes
        if known is not None and same and known.layout.draft_width == self.draft_width:
            return known.layout
        layout = self._fitting(rows, state)
        self._checked = _Pools(weakref.ref(rows), weakref.ref(state), shapes, layout)
        return layout

    def _fitting(self, rows: torch.Tensor, state: torch.Tensor) -> PoolLayout:
        for name, pool in (("rows", rows), ("state", state)):
            flat = pool.dim() == 2 and pool.is_contiguous() and pool.device.type == "cpu"
            if not flat or pool.dtype != torch.float32:
                raise BatchError(f"{name}: expected a contiguous two-dimensional fp32 CPU tensor")
        one = self.layout(1)
        block_tokens, rest = divmod(rows.shape[1], one.block_floats) if one.block_floats else (1, 0)
        if rest or block_tokens < 1:
            raise BatchError(f"rows: {rows.shape[1]} floats a block is no multiple of {one.block_floats} a token")
        if state.shape[1] != one.slot_floats:
            raise BatchError(f"state: expected {one.slot_floats} floats a slot, found {state.shape[1]}")
        return self.layout(block_tokens)


def _arrays(segments: Sequence[Segment]) -> tuple[array[int], ...]:
    """ids, tokens, start, slot, logits, blocks, num_blocks: the order of `Pass`."""
    ids, blocks = array("i"), array("i")
    for segment in segments:
        ids.extend(segment.ids)
        blocks.extend(segment.blocks)
    return (
        ids,
        array("i", [len(s.ids) for s in segments]),
        array("q", [s.start for s in segments]),
        array("i", [s.slot for s in segments]),
        array("i", [LOGITS_MODES[s.logits] for s in segments]),
        blocks,
        array("i", [len(s.blocks) for s in segments]),
    )
