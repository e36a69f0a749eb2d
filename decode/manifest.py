"""What an opened handoff and its manifest must say before anything of it is decoded from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from model.batch import PoolLayout
from moonrelay.errors import HandoffRefused
from moonrelay.prefix import Fingerprint

Refusal = Literal[
    "fingerprint",  # another model, tokenizer, layout version or arithmetic
    "dtype",  # rows or snapshots are stored in another type
    "drafter",  # made with another drafter, or without one; or its rows begin past the prompt's end
    "layout",  # shapes differ
    "tp_size",  # a split that this worker cannot map
    "tokens_in_state",  # not the prompt that was reserved for
    "row_spans",  # number, order or length of the row regions
    "state_spans",  # number, order or length of the state regions
    "span_bounds",  # a region that is no block or not its layers' place in a slot, or outside the source's pools
    "next_token",  # not in the vocabulary
    "sampler_position",  # the next draw would be for another position
    "fence",  # no lease, or one of a numbering that never was
    "stale_epoch",  # made by a process that has restarted since
    "held",  # the owner does not agree on the blocks that need not move
    "parts",  # the manifest contradicts what was opened or announced
    "reservation",  # unknown here, expired, or used
    "withdrawn",  # the owner gave the request up, or no longer knows it
    "checksum",  # bytes differ from what was promised
    "transfer",  # a read or the way to the owner failed
    "deadline",  # a read, the lease or the reservation took too long
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
class StateRegions:
    """KDA layers [first_layer, end_layer): recurrent state of all heads, and conv history."""

    first_layer: int
    end_layer: int
    recurrent: Region
    conv: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Whose heads the state regions hold: [first_head, end_head) of rank `tp_rank`."""

    tp_size: int
    tp_rank: int
    first_head: int
    end_head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Blocks [0, num_blocks) under `root`, named by the chained hash of the last."""

    root: bytes
    prefix_hash: bytes
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Who will hand over what, free of its wire form. `pools` are the source's pool lengths by id."""

    handoff_id: str
    fingerprint: Fingerprint
    layout: PoolLayout
    split: Split
    prompt_tokens: int
    instance_id: str
    epoch: int
    pools: Mapping[int, int]
    fence: int
    drafter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A handoff's whole promise. `rows` begin after the held blocks, the drafter's at token `draft_first`."""

    opened: Opened
    next_token: int
    sampler_position: int
    rows: Sequence[Region]
    state: Sequence[StateRegions]
    held: Held | None
    lease_ms: int
    draft_first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mine:
    """What this worker is and what it reserved. `epochs`: the live instances' epochs, as far as membership knows."""

    fingerprint: Fingerprint
    layout: PoolLayout
    vocab_size: int
    prompt_tokens: int
    epochs: Mapping[str, int]
    drafter: str = ""


def refused(reason: Refusal, message: str) -> HandoffRefused:
    return HandoffRefused(f"handoff refused: {message}", reason=reason)


def check_opened(opened: Opened, mine: Mine) -> HandoffRefused | None:
    """None where this pair fits and the source may be believed; else why not, the most telling reason first."""
    return _check_identity(opened, mine) or _check_prompt(opened, mine) or _check_source(opened, mine)


def check_manifest(manifest: Manifest, opened: Opened, mine: Mine, held: Held | None) -> HandoffRefused | None:
    """None where every promise can be kept here. Regions are `decode.parts`' matter.

    `opened` was accepted, and `held` is what the follower asked for.
    """
    return (
        check_opened(manifest.opened, mine)
        or _check_same_handoff(manifest.opened, opened)
        or _check_position(manifest, mine)
        or _check_held(manifest, held)
        or _check_draft_first(manifest)
        or _check_lease(manifest)
    )


def _check_identity(opened: Opened, mine: Mine) -> HandoffRefused | None:
    theirs, ours = opened.fingerprint, mine.fingerprint
    for name in ("row_dtype", "snapshot_dtype"):
        if getattr(theirs, name) != getattr(ours, name):
            return refused("dtype", f"{name} {getattr(theirs, name)!r}, expected {getattr(ours, name)!r}")
    for name in ours.__struct_fields__:
        if getattr(theirs, name) != getattr(ours, name):
            return refused("fingerprint", f"{name} {getattr(theirs, name)!r}, expected {getattr(ours, name)!r}")
    if opened.drafter != mine.drafter:
        return refused("drafter", f"drafter {opened.drafter or 'none'}, expected {mine.drafter or 'none'}")
    if opened.layout != mine.layout:
        return refused("layout", f"{opened.layout}, expected {mine.layout}")
    whole = Split(tp_size=1, tp_rank=0, first_head=0, end_head=mine.layout.num_heads)
    if opened.split != whole:
        return refused("tp_size", f"{opened.split}, expected {whole}")
    return None


def _check_prompt(opened: Opened, mine: Mine) -> HandoffRefused | None:
    tokens = opened.prompt_tokens
    if tokens != mine.prompt_tokens or tokens < 1:
        return refused("tokens_in_state", f"{tokens} tokens in state, reserved for {mine.prompt_tokens}")
    return None


def _check_source(opened: Opened, mine: Mine) -> HandoffRefused | None:
    if opened.fence < 1:
        return refused("fence", f"fence {opened.fence}")
    live = mine.epochs.get(opened.instance_id)
    # An instance that membership has not shown yet may be new; the transport checks its epoch again.
    if live is not None and live != opened.epoch:
        return refused("stale_epoch", f"{opened.instance_id} is at epoch {live}, the handoff at {opened.epoch}")
    return None


def _check_same_handoff(manifest: Opened, opened: Opened) -> HandoffRefused | None:
    for name in ("handoff_id", "instance_id", "epoch", "fence", "pools"):
        if getattr(manifest, name) != getattr(opened, name):
            return refused("parts", f"{name} {getattr(manifest, name)!r}, opened as {getattr(opened, name)!r}")
    return None


def _check_position(manifest: Manifest, mine: Mine) -> HandoffRefused | None:
    if not 0 <= manifest.next_token < mine.vocab_size:
        return refused("next_token", f"next token {manifest.next_token} outside a vocabulary of {mine.vocab_size}")
    # Tokens [0, P) are in the state and P is `next_token`, already drawn; the next draw is for P + 1.
    expected = manifest.opened.prompt_tokens + 1
    if manifest.sampler_position != expected:
        return refused("sampler_position", f"position {manifest.sampler_position}, expected {expected}")
    return None


def _check_held(manifest: Manifest, held: Held | None) -> HandoffRefused | None:
    if manifest.held != held:
        return refused("held", f"the owner keeps back {manifest.held}, asked for {held}")
    return None


def _check_draft_first(manifest: Manifest) -> HandoffRefused | None:
    first, tokens = manifest.draft_first, manifest.opened.prompt_tokens
    if not 0 <= first <= tokens:
        return refused("drafter", f"the drafter's rows begin at token {first} of {tokens}")
    return None


def _check_lease(manifest: Manifest) -> HandoffRefused | None:
    if manifest.lease_ms < 1:
        return refused("fence", f"a lease of {manifest.lease_ms} ms")
    return None
