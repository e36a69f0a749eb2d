"""A sequence's ids and where its newest ones stood before: what drafts are read from. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

WINDOW = 16_384  # newest ids that are looked through: what a look-up remembers of a long prompt, and takes at first
LONGEST = 48  # ids that are compared; a longer match says no more
ENOUGH = 8  # a match this long is taken at once, and the latest of such
TRIES = 16  # earlier places of the newest pair that are compared


class Text(Sequence[int]):
    """Grows at its end. A look-up costs microseconds however long it is: each pair of neighbours knows where it stood
    the last time. The first look-up reads what is there, up to `WINDOW` ids."""

    __slots__ = ("_before", "_first", "_found", "_ids", "_last")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = array("I", ids)
        self._last: dict[int, int] = {}  # a pair -> where it last ended
        self._before = array("i")  # for each end from `_first` on, where its pair had ended before; 0: nowhere
        self._found = 0, 0, 0  # how long the text was at the last look-up, and what that gave
        self._first = -1  # -1: nobody has looked up anything yet

    def extend(self, ids: Iterable[int]) -> None:
        self._ids.extend(ids)

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> array[int]: ...
    def __getitem__(self, index: int | slice) -> int | array[int]:
        return self._ids[index]

    def look_up(self) -> tuple[int, int]:
        """Where an earlier occurrence of the text's end ends, and the length that is the same.

        The latest of the longest of those tried. Units: ids; at least 2, or (0, 0) where the newest two are new.
        """
        ids, before = self._ids, self._before
        count = len(ids)
        if count < 3:
            return 0, 0
        if self._found[0] != count:
            self._found = count, *self._look_up(ids, before)
        return self._found[1:]

    def _look_up(self, ids: array[int], before: array[int]) -> tuple[int, int]:
        self._index()
        place, found, longest = self._last.get(ids[-2] << 32 | ids[-1], 0), 0, 0
        for _ in range(TRIES):
            if not place:
                break
            matched, most = 2, min(place, LONGEST)
            while matched < most and ids[place - 1 - matched] == ids[-1 - matched]:
                matched += 1
            if matched > longest:
                found, longest = place, matched
            if longest >= ENOUGH:
                break
            place = before[place - self._first]
        return found, longest

    def after(self, place: int, length: int) -> list[int]:
        """The `length` ids from `place` on; where the text ends before, they repeat as they would if it went on."""
        tokens = self._ids[place : place + length].tolist()
        period = len(self._ids) - place
        while len(tokens) < length:
            tokens.append(tokens[len(tokens) - period])
        return tokens

    def _index(self) -> None:
        """Take up the pairs that ended before the text does: the newest must not find itself."""
        ids, last, before = self._ids, self._last, self._before
        if self._first < 0:
            self._first = max(len(ids) - WINDOW, 2)
        start = self._first + len(before)
        if start >= len(ids):
            return
        older = ids[start - 2]
        for end in range(start, len(ids)):
            newer = ids[end - 1]
            pair = older << 32 | newer
            before.append(last.get(pair, 0))
            last[pair] = end
            older = newer
