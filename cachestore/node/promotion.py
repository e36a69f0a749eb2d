"""Entries as files, files as entries, and the reading of them into the node's memory, in a reading thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from cachestore.checksum import checksum
from cachestore.entries import BLOCK, Key, Offer
from cachestore.node.allocator import Extent
from cachestore.node.books import Region, Stored
from cachestore.node.file_form import Header, RefusedFile
from cachestore.node.files import EntryFiles

View = Callable[[int, int], memoryview]


def bring(
    files: EntryFiles, jobs: Sequence[tuple[Header, tuple[Extent, ...]]], view: View
) -> list[list[Region] | RefusedFile]:
    """For each entry: the regions that it now has in its extents, verified, or why its file must not be served."""
    results: list[list[Region] | RefusedFile] = []
    for header, extents in jobs:
        places = lay_out(header, extents)
        try:
            files.read(header, [[view(offset, length) for offset, length in parts] for parts in places])
        except RefusedFile as refused:
            results.append(refused)
            continue
        regions = []
        for parts, (_, xxh3) in zip(places, header.regions, strict=True):
            for offset, length in parts:
                whole = len(parts) == 1  # then it keeps its checksum; pieces get their own
                regions.append(Region(offset, length, xxh3 if whole else checksum(view(offset, length))))
        results.append(regions)
    return results


def lay_out(header: Header, extents: Sequence[Extent]) -> list[list[tuple[int, int]]]:
    """Where each region of the file goes: (offset, length) pieces in order."""
    room = [(extent.offset, extent.length) for extent in extents]
    places: list[list[tuple[int, int]]] = []
    for length, _ in header.regions:
        parts = []
        while length:
            offset, left = room.pop(0)
            taken = min(left, length)
            parts.append((offset, taken))
            length -= taken
            if taken < left:
                room.insert(0, (offset + taken, left - taken))
        places.append(parts)
    return places


def header_of(entry: Stored) -> Header:
    """What an entry's file says first."""
    key, parent = entry.offer.key, entry.offer.parent
    kind: Literal["block", "snapshot"] = "block" if key.kind == BLOCK else "snapshot"
    return Header(
        root=key.root,
        kind=kind,
        prefix_hash=key.prefix_hash,
        parent=parent.prefix_hash if parent is not None and kind == "block" else None,
        depth=entry.offer.depth,
        regions=entry.sums or tuple((r.length, r.xxh3) for r in entry.regions),
    )


def offer_of(header: Header) -> Offer:
    """The entry that a file holds."""
    rests_on = header.prefix_hash if header.kind == "snapshot" else header.parent
    return Offer(
        key=Key(header.root, header.kind, header.prefix_hash),
        parent=Key(header.root, BLOCK, rests_on) if rests_on is not None else None,
        depth=header.depth,
        nbytes=header.nbytes,
    )
