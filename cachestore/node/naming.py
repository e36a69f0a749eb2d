"""What the index says of a node's entries. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cachestore.entries import BLOCK, Key, Offer
from cachestore.lookup import Entry, EntryName, Tier


def index_entries(keys: Iterable[Key], held: Callable[[Key], tuple[Offer, Tier] | None]) -> dict[EntryName, Entry]:
    """Entries for those of `keys` that `held` knows: what a lookup may find now, in memory or on disk."""
    firsts: dict[Key, int] = {}
    entries: dict[EntryName, Entry] = {}
    for key in keys:
        found = held(key)
        if found is None:
            continue
        offer, tier = found
        if key.kind == BLOCK:
            parent = offer.parent.prefix_hash if offer.parent is not None else None
            first = _first(offer, held, firsts)
            entries["block", key.prefix_hash] = Entry(nbytes=offer.nbytes, tier=tier, first=first, parent=parent)
        else:
            entries["snapshot", key.prefix_hash] = Entry(nbytes=offer.nbytes, tier=tier)
    return entries


def _first(offer: Offer, held: Callable[[Key], tuple[Offer, Tier] | None], firsts: dict[Key, int]) -> int:
    """The depth where the unbroken run to this block begins; `firsts` keeps what was found on the way."""
    walked = [offer]
    while (parent := walked[-1].parent) is not None and parent not in firsts and (found := held(parent)) is not None:
        walked.append(found[0])
    parent = walked[-1].parent
    first = firsts[parent] if parent in firsts and parent is not None else walked[-1].depth
    firsts.update((each.key, first) for each in walked)
    return first
