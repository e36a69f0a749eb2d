"""Entries as files, files as entries, and the reading of them into the node's memory, in a reading thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cachestore.checksum import checksum
from cachestore.entries import BLOCK, Key, Offer
from cachestore.node.allocator import Extent
from cachestore.node.books import DraftForm, Region, Stored
from cachestore.node.file_form import Header, RefusedFile
from cachestore.node.files import EntryFiles

View = Callable[[int, int], memoryview]


@dataclass(frozen=True, slots=True)
class Job:
    """An entry to be read from its file, and the memory for it and for its drafter rows."""

    header: Header
    extents: tuple[Extent, ...]
    draft_extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Brought:
    """Verified regions. None of the drafter rows where the file has none, or bad ones."""

    regions: list[Region]
    draft: list[Region]


def job_of(entry: Stored) -> Job:
    return Job(header_of(entry), entry.extents, entry.draft.extents if entry.draft is not None else ())


def bring(files: EntryFiles, jobs: Sequence[Job], view: View) -> list[Brought | RefusedFile]:
    """For each entry: what it now has in its extents, or why its file must not be served."""
    results: list[Brought | RefusedFile] = []
    for job in jobs:
        header = job.header
        places, draft_places = lay_out(header.regions, job.extents), lay_out(header.draft, job.draft_extents)
        into, draft_into = (
            [[view(offset, length) for offset, length in parts] for parts in each] for each in (places, draft_places)
        )
        try:
            agrees = files.read(header, into, draft_into)
        except RefusedFile as refused:
            results.append(refused)
            continue
        draft = _regions(header.draft, draft_places, view) if agrees else []
        results.append(Brought(_regions(header.regions, places, view), draft))
    return results


def _regions(sums: Sequence[tuple[int, int]], places: Sequence[list[tuple[int, int]]], view: View) -> list[Region]:
    regions = []
    for parts, (_, xxh3) in zip(places, sums, strict=True):
        for offset, length in parts:
            whole = len(parts) == 1  # then it keeps its checksum; pieces get their own
            regions.append(Region(offset, length, xxh3 if whole else checksum(view(offset, length))))
    return regions


def lay_out(sums: Sequence[tuple[int, int]], extents: Sequence[Extent]) -> list[list[tuple[int, int]]]:
    """Where each part of the file goes: (offset, length) pieces in order."""
    room = [(extent.offset, extent.length) for extent in extents]
    places: list[list[tuple[int, int]]] = []
    for length, _ in sums:
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
    """What an entry's file says first, or is to say."""
    key, parent = entry.offer.key, entry.offer.parent
    kind: Literal["block", "snapshot"] = "block" if key.kind == BLOCK else "snapshot"
    draft = entry.draft.form if entry.draft is not None else None
    if entry.file_bytes:
        draft = entry.filed_draft
    return Header(
        root=key.root,
        kind=kind,
        prefix_hash=key.prefix_hash,
        parent=parent.prefix_hash if parent is not None and kind == "block" else None,
        depth=entry.offer.depth,
        regions=entry.sums or tuple((r.length, r.xxh3) for r in entry.regions),
        drafter=draft.drafter if draft is not None else "",
        draft=draft.sums if draft is not None else (),
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


def draft_of(header: Header) -> DraftForm | None:
    """The drafter rows that a file holds."""
    return DraftForm(header.drafter, header.draft) if header.draft else None
