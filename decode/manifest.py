"""What a manifest must say before a byte of it is pulled. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from model.batch import FLOAT_BYTES, PoolLayout
from moonrelay.errors import HandoffRefused
from moonrelay.prefix import Fingerprint

Refusal = Literal[
    "fingerprint",  # another model, tokenizer, layout version or arithmetic
    "dtype",  # rows or snapshots are stored in another type
    "layout",  # shapes differ
    "tp_size",  # a split that this worker cannot map
    "tokens_in_state",  # not the prompt that was reserved for
    "row_spans",  # number or length of the row regions
    "state_spans",  # number or length of the state regions
    "span_bounds",  # a region outside the source's pools
    "next_token",  # not in the vocabulary
    "sampler_position",  # the next draw would be for another position
    "fence",  # no lease, or one of a numbering that never was
    "stale_epoch",  # made by a process that has restarted since
    "reservation",  # unknown here, expired, or used
    "checksum",  # bytes differ from what was promised
    "transfer",  # the read failed
    "deadline",  # the read or the lease took too long
]
REFUSALS: Final[tuple[Refusal, ...]] = get_args(Refusal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A range of one of the source's pools. Units: bytes."""

    pool: int
    offset: int
    length: int
    xxh3: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A handoff's promise, free of its wire form. `pools` are the source's pool lengths by id."""

    handoff_id: str
    fingerprint: Fingerprint
    layout: PoolLayout
    tp_size: int
    tokens_in_state: int
    next_token: int
    sampler_position: int
    rows: Sequence[Region]
    state: Sequence[Region]
    instance_id: str
    epoch: int
    pools: Mapping[int, int]
    fence: int
    lease_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mine:
    """What this worker is and what it reserved. `epochs`: the live instances' epochs, as far as membership knows."""

    fingerprint: Fingerprint
    layout: PoolLayout
    tp_size: int
    vocab_size: int
    prompt_tokens: int
    epochs: Mapping[str, int]


def check_manifest(manifest: Manifest, mine: Mine) -> HandoffRefused | None:
    """None where every promise can be kept here; else why not, the most telling reason first."""
    return (
        _check_identity(manifest, mine)
        or _check_position(manifest, mine)
        or _check_regions(manifest, mine.layout)
        or _check_source(manifest, mine)
    )


def refused(reason: Refusal, message: str) -> HandoffRefused:
    return HandoffRefused(f"handoff refused: {message}", reason=reason)


def _check_identity(manifest: Manifest, mine: Mine) -> HandoffRefused | None:
    theirs, ours = manifest.fingerprint, mine.fingerprint
    for name in ("row_dtype", "snapshot_dtype"):
        if getattr(theirs, name) != getattr(ours, name):
            return refused("dtype", f"{name} {getattr(theirs, name)!r}, expected {getattr(ours, name)!r}")
    for name in ours.__struct_fields__:
        if getattr(theirs, name) != getattr(ours, name):
            return refused("fingerprint", f"{name} {getattr(theirs, name)!r}, expected {getattr(ours, name)!r}")
    if manifest.layout != mine.layout:
        return refused("layout", f"{manifest.layout}, expected {mine.layout}")
    if manifest.tp_size != mine.tp_size:
        return refused("tp_size", f"tp_size {manifest.tp_size}, expected {mine.tp_size}")
    return None


def _check_position(manifest: Manifest, mine: Mine) -> HandoffRefused | None:
    tokens = manifest.tokens_in_state
    if tokens != mine.prompt_tokens or tokens < 1:
        return refused("tokens_in_state", f"{tokens} tokens in state, reserved for {mine.prompt_tokens}")
    if not 0 <= manifest.next_token < mine.vocab_size:
        return refused("next_token", f"next token {manifest.next_token} outside a vocabulary of {mine.vocab_size}")
    # Tokens [0, P) are in the state and P is `next_token`, already drawn; the next draw is for P + 1.
    if manifest.sampler_position != tokens + 1:
        return refused("sampler_position", f"position {manifest.sampler_position}, expected {tokens + 1}")
    return None


def _check_regions(manifest: Manifest, layout: PoolLayout) -> HandoffRefused | None:
    blocks = -(-manifest.tokens_in_state // layout.block_tokens)
    block_bytes = layout.block_floats * FLOAT_BYTES
    lengths = [region.length for region in manifest.rows]
    if lengths != [block_bytes] * blocks:
        return refused("row_spans", f"{len(lengths)} row regions, expected {blocks} of {block_bytes} bytes each")
    lengths = [region.length for region in manifest.state]
    expected = [layout.recurrent_floats * FLOAT_BYTES, layout.conv_floats * FLOAT_BYTES]
    if lengths != expected:
        return refused("state_spans", f"state regions of {lengths} bytes, expected {expected}")
    for region in (*manifest.rows, *manifest.state):
        if region.offset < 0 or region.offset + region.length > manifest.pools.get(region.pool, -1):
            return refused(
                "span_bounds", f"a region at {region.offset} of {region.length} bytes leaves pool {region.pool}"
            )
    return None


def _check_source(manifest: Manifest, mine: Mine) -> HandoffRefused | None:
    if manifest.fence < 1 or manifest.lease_ms < 1:
        return refused("fence", f"fence {manifest.fence} with a lease of {manifest.lease_ms} ms")
    live = mine.epochs.get(manifest.instance_id)
    # An instance that membership has not shown yet may be new; the transport checks its epoch again.
    if live is not None and live != manifest.epoch:
        return refused("stale_epoch", f"{manifest.instance_id} is at epoch {live}, the manifest at {manifest.epoch}")
    return None
