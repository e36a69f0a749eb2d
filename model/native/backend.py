"""`NativeBackend`: the network in C++, behind `model.batch.Backend`."""

from __future__ import annotations

import ctypes
import threading
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch

from model.batch import Fold, PoolLayout, Segment
from model.errors import BackendUnavailable
from model.native import selfcheck
from model.native.build import build
from model.native.ffi import ALL_LOGITS, LOGITS_MODES, Clock, Op, Pass, load
from model.native.loader import Loader, network_shape
from model.native.sampler import NativeSampler
from moonrelay.errors import InvariantError

if TYPE_CHECKING:
    from model.config import ModelConfig
    from model.native.loader import WeightSource
    from model.progress import LayerProgress

WRONG_PASS = 2  # mr_forward: refused before anything was touched


class _Known(NamedTuple):
    """A tensor that was found to fit, not kept alive, and its part of a `Pass`."""

    tensor: weakref.ref[torch.Tensor]
    address: int
    shape: tuple[int, int]
    size: int  # tokens of a block or of a record; bytes of a token's taps
    draft_width: int

    def is_still(self, tensor: torch.Tensor, draft_width: int) -> bool:
        same = self.tensor() is tensor and tensor.data_ptr() == self.address
        return same and self.draft_width == draft_width


class BatchError(InvariantError):
    """A batch that would read or write outside the pools, or twice. It was refused; rows and state are unchanged."""


@cache
def library() -> ctypes.CDLL:
    """Build if needed, load and check, once per process. Raises BackendUnavailable."""
    lib = load(build())
    small = NativeBackend(selfcheck.CONFIG, selfcheck.PatternWeights(), lib=lib, widen_bytes=0)
    found, right = (selfcheck.digest(small), selfcheck.draws_digest(lib)), (selfcheck.DIGEST, selfcheck.DRAWS)
    if found != right:
        raise BackendUnavailable(f"the {small.isa} library computes {found} where {right} is right")
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
        # A serving process has its pools, records and taps for life: what was found of them is not looked for again.
        self._rows: _Known | None = None
        self._state: _Known | None = None
        self._records: _Known | None = None
        self._taps: _Known | None = None
        self._pass = Pass()
        self._handle: int | None = None  # set first: __del__ runs even when the rest fails
        self._lib = lib or library()
        self.sampler = NativeSampler(self._lib)
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
        self._one_pass = threading.Lock()  # the C++ model's scratch and `_pass` serve one at a time

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
        self._taps = None

    def forward(
        self,
        segments: Sequence[Segment],
        rows: torch.Tensor,
        state: torch.Tensor,
        *,
        progress: LayerProgress | None = None,
        records: torch.Tensor | None = None,
        taps: torch.Tensor | None = None,
        taps_at: int = 0,
    ) -> torch.Tensor:
        """See `Verifier.forward`. Raises BatchError (nothing touched) or MemoryError (rows and state undefined)."""
        try:
            numbers, facts, num_tokens, num_logits = _packed(segments)
        except OverflowError as error:
            raise BatchError(f"an index is no 32-bit number: {error}") from error
        work = self._pass
        with self._one_pass:
            self._set_rows(rows)
            self._set_state(state)
            self._set_records(records)
            self._set_taps(taps, taps_at, num_tokens)
            out = torch.empty((num_logits, self.config.vocab_size))
            work.num_segments, work.numbers, work.facts = len(segments), _address(numbers), _address(facts)
            work.out = out.data_ptr()
            work.progress = None if progress is None else progress.address
            status = self._lib.mr_forward(self._handle, work)
            if status:
                self._fail(status)
        return out

    def fold(self, folds: Sequence[Fold], state: torch.Tensor, records: torch.Tensor) -> None:
        """Advance slots by what is kept of verified segments. Raises BatchError, and then nothing was touched."""
        facts = array("q")
        for fold in folds:
            facts.extend((fold.record, fold.slot, fold.first, fold.tokens, fold.start))
        work = self._pass
        with self._one_pass:
            self._set_state(state)
            self._set_records(records)
            work.num_segments, work.facts = len(folds), _address(facts)
            status = self._lib.mr_fold(self._handle, work)
            if status:
                self._fail(status)

    def rouse(self) -> None:
        """Have the threads awake: a verification or a draft follows in less than half a millisecond."""
        self._lib.mr_rouse(self._handle)

    def _fail(self, status: int) -> NoReturn:
        raise (BatchError if status == WRONG_PASS else MemoryError)(self._lib.mr_error().decode())

    def profile(self, clock: Clock) -> dict[str, float]:
        """Choose the clock that times operations; return the seconds spent in each since the last call."""
        seconds = (ctypes.c_double * len(Op))()
        self._lib.mr_profile(self._handle, clock, seconds)
        return {op.name.lower(): seconds[op] for op in Op}

    def _set_rows(self, rows: torch.Tensor) -> None:
        known, work = self._rows, self._pass
        if known is None or not known.is_still(rows, self.draft_width):
            _must_be_flat("rows", rows)
            one = self.layout(1)
            block_tokens, rest = divmod(rows.shape[1], one.block_floats) if one.block_floats else (1, 0)
            if rest or block_tokens < 1:
                raise BatchError(f"rows: {rows.shape[1]} floats a block is no multiple of {one.block_floats} a token")
            known = self._rows = self._known(rows, block_tokens)
        work.rows, work.block_tokens = known.address, known.size
        work.pool_blocks, work.block_floats = known.shape

    def _set_state(self, state: torch.Tensor) -> None:
        known, work = self._state, self._pass
        if known is None or not known.is_still(state, self.draft_width):
            _must_be_flat("state", state)
            floats = self.layout(1).slot_floats
            if state.shape[1] != floats:
                raise BatchError(f"state: expected {floats} floats a slot, found {state.shape[1]}")
            known = self._state = self._known(state, 0)
        work.state = known.address
        work.pool_slots, work.slot_floats = known.shape

    def _set_records(self, records: torch.Tensor | None) -> None:
        known, work = self._records, self._pass
        if records is None:
            work.num_records = 0
            return
        if known is None or not known.is_still(records, self.draft_width):
            _must_be_flat("records", records)
            tokens, rest = divmod(records.shape[1], self.layout(1).record_floats(1))
            if rest or tokens < 1:
                raise BatchError(f"records: {records.shape[1]} floats are no whole number of tokens")
            known = self._records = self._known(records, tokens)
        work.records, work.record_tokens = known.address, known.size
        work.num_records, work.record_floats = known.shape

    def _set_taps(self, taps: torch.Tensor | None, at: int, tokens: int) -> None:
        known, work = self._taps, self._pass
        if taps is None:
            work.taps = None
            return
        if known is None or not known.is_still(taps, self.draft_width):
            width, hidden = self._num_taps, self.config.hidden_size
            flat = taps.dtype == torch.float32 and taps.is_contiguous()
            if not width or not flat or taps.shape[1:] != (width, hidden):
                expected = f"contiguous fp32 [tokens, {width}, {hidden}]"
                raise BatchError(f"taps: expected {expected}, found {list(taps.shape)}")
            known = self._taps = self._known(taps, taps.stride(0) * taps.element_size())
        if at < 0 or at + tokens > known.shape[0]:
            raise BatchError(f"taps: {tokens} tokens from row {at} on do not fit {known.shape[0]}")
        work.taps = known.address + at * known.size

    def _known(self, tensor: torch.Tensor, size: int) -> _Known:
        shape = (tensor.shape[0], tensor.shape[1])
        return _Known(weakref.ref(tensor), tensor.data_ptr(), shape, size, self.draft_width)


def _must_be_flat(name: str, tensor: torch.Tensor) -> None:
    flat = tensor.dim() == 2 and tensor.is_contiguous() and tensor.device.type == "cpu"
    if not flat or tensor.dtype != torch.float32:
        raise BatchError(f"{name}: expected a contiguous two-dimensional fp32 CPU tensor")


def _packed(segments: Sequence[Segment]) -> tuple[array[int], array[int], int, int]:
    """`numbers` and `facts` as `Pass` has them, the tokens and the rows of logits. Few and small objects: a pass
    leaves nothing of the interpreter in the caches, so that every one of them is fetched anew."""
    numbers, facts, num_logits = array("i"), array("q"), 0
    for segment in segments:
        ids, mode, record = segment.ids, LOGITS_MODES[segment.logits], segment.record
        numbers.extend(ids)
        num_logits += len(ids) if mode == ALL_LOGITS else mode
        facts.extend(
            (len(ids), segment.start, segment.slot, mode, -1 if record is None else record, len(segment.blocks))
        )
    num_tokens = len(numbers)
    for segment in segments:
        numbers.extend(segment.blocks)
    return numbers, facts, num_tokens, num_logits


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
