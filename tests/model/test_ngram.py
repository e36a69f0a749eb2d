"""Prompt lookup against its own definition, spelled out with lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.drafting import DraftRequest
from model.errors import ModelError
from model.ngram import LONGEST, NgramDrafter, look_up
from moonrelay.errors import InvariantError


def naive(context: list[int]) -> tuple[int, int]:
    for matched in range(min(LONGEST, len(context) - 1), 0, -1):
        for start in range(len(context) - matched - 1, -1, -1):
            if context[start : start + matched] == context[-matched:]:
                return start + matched, matched
    return 0, 0


# Ids whose bytes overlap when shifted: a search over bytes must not take them for one another.
IDS = st.sampled_from([0, 1, 256, 257, 65_536, 16_777_216, 16_843_009])


@given(context=st.lists(IDS, min_size=1, max_size=40))
def test_the_most_recent_longest_match(context):
    assert look_up(context) == naive(context)


def request(text: list[int], length: int, **changes) -> DraftRequest:
    fields = {"anchor": text[-1], "position": len(text) - 1, "blocks": (), "context": lambda: text}
    return DraftRequest(length=length, **{**fields, **changes})


@given(context=st.lists(IDS, min_size=1, max_size=40), length=st.integers(1, 7))
def test_drafts_go_on_as_the_text_did(context, length):
    (found,) = NgramDrafter().draft([request(context, length)], None)
    at, matched = naive(context)
    assert found.tokens == (context[at : at + length] if matched else [])
    assert found.laws is None and len(found.confidence) == len(found.tokens)
    assert all(0.0 < kept < 1.0 for kept in found.confidence)


def test_each_request_has_its_own_text():
    asked = [request([1, 2, 3, 1, 2], 4), request([5, 6, 7], 2), request([9, 9], 3)]
    found = NgramDrafter().draft(asked, None)
    assert [p.tokens for p in found] == [[3, 1, 2], [], [9]]


def test_longer_matches_are_trusted_more():
    drafter = NgramDrafter()
    (once,) = drafter.draft([request([1, 2, 3, 9, 3], 1)], None)
    (thrice,) = drafter.draft([request([1, 2, 3, 9, 1, 2, 3], 1)], None)
    assert once.tokens == thrice.tokens == [9] and once.confidence < thrice.confidence


@pytest.mark.parametrize("changes", [{"context": None}, {"anchor": 7}, {"length": 0}, {"length": 8}])
def test_requests_that_make_no_sense_are_refused(changes):
    asked = request([1, 2, 1], **{"length": 2, **changes})
    with pytest.raises(InvariantError):
        NgramDrafter().draft([asked], None)


def test_a_draft_length_of_zero_is_refused_by_name():
    with pytest.raises(ModelError, match="draft length"):
        NgramDrafter(block_len=0)
