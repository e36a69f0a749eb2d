"""A look-up against its own definition, spelled out with lists; and a text that grows beside one that was there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from model.text import ENOUGH, LONGEST, TRIES, WINDOW, Text

IDS = st.lists(st.integers(0, 3), max_size=60)


def matched(ids: list[int], place: int) -> int:
    """How many ids before `place` are those that end the text."""
    length = 0
    while length < min(place, LONGEST) and ids[place - 1 - length] == ids[-1 - length]:
        length += 1
    return length


def naive(ids: list[int]) -> tuple[int, int]:
    best = 0, 0
    places = [place for place in range(len(ids) - 1, 1, -1) if matched(ids, place) >= 2]
    for place in places[:TRIES]:
        if matched(ids, place) > best[1]:
            best = place, matched(ids, place)
        if best[1] >= ENOUGH:
            break
    return best


@given(ids=IDS)
def test_the_latest_of_the_longest(ids: list[int]) -> None:
    assert Text(ids).look_up() == naive(ids)


@given(pieces=st.lists(IDS, max_size=12))
def test_growing_changes_nothing(pieces: list[list[int]]) -> None:
    text, ids = Text(), []
    for piece in pieces:
        text.extend(piece)
        ids += piece
        assert text.look_up() == naive(ids)
        assert (list(text), text[:], len(text)) == (ids, text[0:], len(ids))


def test_of_a_very_long_text_the_newest_ids_are_looked_through() -> None:
    text = Text([5, 6, 7, *range(100, 100 + WINDOW), 5, 6])
    assert text.look_up() == (0, 0)
    text.extend([9, 5, 6])
    assert text.look_up() == (len(text) - 3, 2)


@given(ids=st.lists(st.integers(0, 3), min_size=3, max_size=40), length=st.integers(1, 63))
def test_what_came_after_goes_on_as_if_each_id_was_drawn(ids: list[int], length: int) -> None:
    place, found = naive(ids)
    if found:
        grown = list(ids)
        for step in range(length):
            grown.append(grown[place + step])
        assert Text(ids).after(place, length) == grown[len(ids) :]
