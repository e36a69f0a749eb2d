"""Whether a prefill and a decode worker can ever hand over to each other, from what both say of themselves. Pure.

The router pairs only workers that fit; each worker says which of the others it can never work with. What may change
from request to request is judged when a handoff is opened.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from moonrelay.membership import Member

Misfit = Literal[
    "fingerprint",  # another model, tokenizer, layout version or arithmetic
    "dtype",  # rows or snapshots are stored in another type
    "drafter",  # one has none, or another: its rows would be read as something else, or not be there
    "layout",  # shapes differ
    "tp_size",  # a split by heads that is not mapped yet
    "transport",  # no way of reading that both have
]
MISFITS: Final[tuple[Misfit, ...]] = get_args(Misfit)
DTYPES: Final = ("row_dtype", "snapshot_dtype")


def unfit(owner: Member, reader: Member) -> Misfit | None:
    """Why `reader` can never adopt what `owner` computes; None where it can, the most telling reason first."""
    theirs, ours = owner.fingerprint, reader.fingerprint
    if theirs is None or ours is None:
        return "fingerprint"
    if any(getattr(theirs, name) != getattr(ours, name) for name in DTYPES):
        return "dtype"
    if theirs != ours:
        return "fingerprint"
    if owner.drafter != reader.drafter:
        return "drafter"
    if owner.layout is None or owner.layout != reader.layout:
        return "layout"
    if (owner.tp_size, reader.tp_size) != (1, 1):  # model/reshard.py knows how; running TP comes later
        return "tp_size"
    # A member that does not say how it reads or is read is believed to be able to.
    if owner.readable_by and reader.reads_by and not set(owner.readable_by) & set(reader.reads_by):
        return "transport"
    return None


def describe(owner: Member, reader: Member, misfit: Misfit) -> str:
    """For people: both workers and what does not agree."""

    def found(member: Member) -> object:
        match misfit:
            case "drafter":
                return f"drafter {member.drafter or 'none'}"
            case "layout":
                return member.layout
            case "tp_size":
                return f"tp_size {member.tp_size}"
            case "transport":
                return f"read by {member.readable_by}, reads by {member.reads_by}"
            case _:
                return member.fingerprint

    return f"{owner.instance_id}: {found(owner)}; {reader.instance_id}: {found(reader)}"
