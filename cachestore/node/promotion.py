"""Reading entries' files into the node's memory. Runs in a reading thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cachestore.checksum import checksum
from cachestore.node.allocator import Extent
from cachestore.node.books import Region
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
