"""State and rows between different tensor-parallel sizes: which bytes a rank reads from which other rank. Pure.

A rank of `tp_size` holds the heads [rank * H / tp, (rank + 1) * H / tp) and stores them as a whole model of that many
heads would (`PoolLayout`). So a slot is not a slice of the whole slot: within each layer the heads' states are one
range, but conv history is three segments (q, k, v), each cut by heads on its own, once per history row. Merging the
three into one range gives a plausible, wrong state (sglang issue 22060). MLA rows are whole on every rank.
Nothing runs this over several ranks yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from model.batch import FLOAT_BYTES, PoolLayout


class ReshardError(ValueError):
    """A split that cannot be mapped, or a plan that would read or write where it must not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """`length` bytes of rank `source_rank`'s slot into the target's slot. Offsets in bytes from the slots' starts."""

    source_rank: int
    source_offset: int
    target_offset: int
    length: int


def heads_of(num_heads: int, tp_size: int, rank: int) -> range:
    """The heads of one rank. Raises: ReshardError where heads do not divide, or there is no such rank."""
    if tp_size < 1 or num_heads % tp_size:
        raise ReshardError(f"{num_heads} heads cannot be split over {tp_size} ranks: expected a divisor")
    if not 0 <= rank < tp_size:
        raise ReshardError(f"rank {rank} of {tp_size}")
    share = num_heads // tp_size
    return range(rank * share, (rank + 1) * share)


def shard_layout(whole: PoolLayout, tp_size: int) -> PoolLayout:
    """What every rank's pools look like. Raises: ReshardError."""
    return replace(whole, num_heads=len(heads_of(whole.num_heads, tp_size, 0)))


def slot_bytes(layout: PoolLayout) -> int:
    return layout.slot_floats * FLOAT_BYTES


def state_plan(whole: PoolLayout, *, source_tp: int, target_tp: int, target_rank: int) -> tuple[Copy, ...]:
    """How rank `target_rank` of `target_tp` fills its slot from the slots of `source_tp` ranks, in target order.

    Raises: ReshardError for an uneven split.
    """
    wanted = heads_of(whole.num_heads, target_tp, target_rank)
    source, target = shard_layout(whole, source_tp), shard_layout(whole, target_tp)
    runs = [run for rank in range(source_tp) if (run := _shared(whole, source_tp, rank, wanted)) is not None]
    return tuple(_merged(_pieces(source, target, runs)))


def rows_source(source_tp: int, target_rank: int) -> int:
    """Which source rank a target reads whole blocks from: every one has them, so the load is spread."""
    return target_rank % source_tp


def check_plan(plan: Sequence[Copy], *, source_bytes: Sequence[int], target_bytes: int) -> None:
    """Every source range inside its rank's slot, every target byte written exactly once. Raises: ReshardError."""
    for copy in plan:
        if not 0 <= copy.source_rank < len(source_bytes):
            raise ReshardError(f"rank {copy.source_rank} of {len(source_bytes)}")
        if copy.length < 1 or copy.source_offset < 0:
            raise ReshardError(f"{copy} is empty or negative")
        if copy.source_offset + copy.length > source_bytes[copy.source_rank]:
            raise ReshardError(f"{copy} leaves a slot of {source_bytes[copy.source_rank]} bytes")
    end = 0
    for copy in sorted(plan, key=lambda c: c.target_offset):
        if copy.target_offset != end:
            raise ReshardError(f"target bytes from {end} on are written twice or not at all: {copy}")
        end += copy.length
    if end != target_bytes:
        raise ReshardError(f"{end} of the target's {target_bytes} bytes are written")


@dataclass(frozen=True, slots=True)
class _Run:
    """Heads that lie together on both sides: `source_first` and `target_first` count within each rank."""

    rank: int
    source_first: int
    target_first: int
    heads: int


def _shared(whole: PoolLayout, source_tp: int, rank: int, wanted: range) -> _Run | None:
    has = heads_of(whole.num_heads, source_tp, rank)
    first, end = max(has.start, wanted.start), min(has.stop, wanted.stop)
    return _Run(rank, first - has.start, first - wanted.start, end - first) if first < end else None


def _pieces(source: PoolLayout, target: PoolLayout, runs: Sequence[_Run]) -> Iterator[Copy]:
    """Copies in target order, one per layer, segment, history row and run."""
    square = source.key_dim * source.value_dim * FLOAT_BYTES
    for layer in range(source.num_kda_layers):
        for run in runs:
            yield Copy(
                source_rank=run.rank,
                source_offset=(layer * source.num_heads + run.source_first) * square,
                target_offset=(layer * target.num_heads + run.target_first) * square,
                length=run.heads * square,
            )
    for layer in range(source.num_kda_layers):
        for segment in range(3):
            width = (source.value_dim if segment == 2 else source.key_dim) * FLOAT_BYTES  # of one head
            for row in range(source.conv_history):
                for run in runs:
                    yield Copy(
                        source_rank=run.rank,
                        source_offset=_conv_row(source, layer, segment, row) + run.source_first * width,
                        target_offset=_conv_row(target, layer, segment, row) + run.target_first * width,
                        length=run.heads * width,
                    )


def _conv_row(layout: PoolLayout, layer: int, segment: int, row: int) -> int:
    """Where history row `row` of q, k or v begins in a slot. Stored order: [layer][q|k|v][row][channel]."""
    keys, values = layout.num_heads * layout.key_dim, layout.num_heads * layout.value_dim
    before = layer * (2 * keys + values) + segment * keys
    floats = before * layout.conv_history + row * (values if segment == 2 else keys)
    return (layout.recurrent_floats + floats) * FLOAT_BYTES


def _merged(pieces: Iterator[Copy]) -> Iterator[Copy]:
    """Join neighbours that go on without a gap on both sides: each copy costs a descriptor."""
    last: Copy | None = None
    for piece in pieces:
        if (
            last is not None
            and piece.source_rank == last.source_rank
            and piece.source_offset == last.source_offset + last.length
            and piece.target_offset == last.target_offset + last.length
        ):
            last = replace(last, length=last.length + piece.length)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
