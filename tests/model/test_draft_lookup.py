"""A drafter that looks back first: what it finds, when it asks the network, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from model.batch import Segment
from model.drafter.lookup import (
    DRAWN,
    DRAWN_MORE,
    GREEDY,
    GREEDY_MORE,
    MATCH_MIN_DRAWN,
    MATCH_SURE_DRAWN,
    MATCH_SURE_GREEDY,
    READ_LEN_MAX,
    LookupFirst,
)
from model.drafting import DraftRequest, Proposal
from model.text import LONGEST, Text
from moonrelay.errors import InvariantError

ROWS = torch.zeros(1, 1)


class Network:
    """Drafts the anchor again and again, and remembers what it was asked."""

    drafter_id, target_layers, block_len, draft_width = "net", (1, 2), 5, 12

    def __init__(self) -> None:
        self.asked: list[DraftRequest] = []
        self.written = 0

    def write_rows(self, segments: Sequence[Segment], taps: torch.Tensor, rows: torch.Tensor) -> None:
        self.written += len(taps)

    def draft(self, requests: Sequence[DraftRequest], rows: torch.Tensor) -> list[Proposal]:
        self.asked += requests
        return [
            Proposal(tokens=[r.anchor] * r.length, confidence=[0.25] * r.length, laws=np.zeros((r.length, 9)))
            for r in requests
        ]


def request(ids: list[int], temperature: float = 0.0, length: int = 4) -> DraftRequest:
    return DraftRequest(
        anchor=ids[-1],
        position=len(ids) - 1,
        blocks=[0],
        length=length,
        temperature=temperature,
        uniforms=[0.5] * length,
        context=lambda: ids,
    )


def test_what_followed_the_last_time_is_drafted_without_the_network() -> None:
    network = Network()
    (found,) = LookupFirst(network).draft([request([1, 2, 3, 4, 5, 6, 7, 8, 10, 9, 1, 2, 3, 4, 5, 6])], ROWS)
    assert (found.tokens, found.laws, network.asked) == ([7, 8, 10, 9], None, [])
    assert len(found.confidence) == 4 and found.confidence == sorted(found.confidence)
    assert all(0.0 < c < 1.0 for c in found.confidence)


def test_where_the_text_ends_a_draft_goes_round() -> None:
    found = LookupFirst(Network()).read(Text([7, 8, 9, 7, 8, 9, 7, 8]), 8, drawn=False)
    assert found is not None and found.tokens == [9, 7, 8, 9, 7, 8, 9, 7]
    found = LookupFirst(Network()).read(Text([5, 5, 5]), 4, drawn=False)
    assert found is not None and found.tokens == [5, 5, 5, 5]


def test_the_longer_the_match_the_surer_and_the_longest_is_nearly_certain() -> None:
    ids = list(range(1, 80))
    for kept in (GREEDY, DRAWN):
        assert kept[2:] == sorted(kept[2:]) and 0.98 < kept[-1] < 1.0 and len(kept) == LONGEST + 1
    found = LookupFirst(Network()).read(Text([*ids, *ids]), READ_LEN_MAX, drawn=False)
    assert found is not None and found.tokens == ids[:READ_LEN_MAX]
    assert found.confidence == [GREEDY[-1]] * READ_LEN_MAX
    short = LookupFirst(Network()).read(Text([*ids, *ids[:3]]), 6, drawn=False)
    assert short is not None and short.confidence == GREEDY[3:9]


@pytest.mark.parametrize("length", [0, READ_LEN_MAX + 1])
def test_a_length_that_is_never_read_is_refused(length: int) -> None:
    with pytest.raises(InvariantError):
        LookupFirst(Network()).read(Text([1, 2, 1, 2]), length, drawn=False)


@pytest.mark.parametrize("matched", range(1, MATCH_SURE_DRAWN + 1))
def test_a_drawn_token_needs_a_longer_match_than_the_likeliest(matched: int) -> None:
    """And the network is asked unless the match says all, but then told what it says."""
    end = list(range(11, 11 + MATCH_SURE_DRAWN))[-matched:]
    ids = [1, *end, 5, 6, 7, 8, *end]
    for temperature, least, sure, more in (
        (0.0, 2, MATCH_SURE_GREEDY, GREEDY_MORE), (0.7, MATCH_MIN_DRAWN, MATCH_SURE_DRAWN, DRAWN_MORE),
    ):  # fmt: skip
        network = Network()
        (found,) = LookupFirst(network).draft([request(ids, temperature)], ROWS)
        assert (found.laws is None) == (matched >= sure) == (not network.asked)
        assert (LookupFirst(network).read(Text(ids), 4, drawn=temperature > 0) is None) == (matched < least)
        if 2 <= matched < sure:
            assert network.asked[0].guess == [5, 6, 7, 8] and network.asked[0].more == more[matched : matched + 4]
        for asked in network.asked:
            assert replace(asked, guess=(), more=()) == replace(network.asked[0], guess=(), more=())
            assert bool(asked.guess) == (matched >= 2)


def test_each_request_of_a_batch_keeps_its_place_and_its_own_draft() -> None:
    repeating, fresh, blind = request([*range(1, 9), *range(1, 7)]), request([5, 6, 7]), request([3, 3, 3, 3, 3])
    object.__setattr__(blind, "context", None)
    network = Network()
    together = LookupFirst(network).draft([fresh, repeating, blind], ROWS)
    assert [proposal.tokens for proposal in together] == [[7] * 4, [7, 8, 1, 2], [3] * 4]
    assert network.asked == [fresh, blind]
    for one, proposal in zip((fresh, repeating, blind), together, strict=True):
        assert LookupFirst(Network()).draft([one], ROWS)[0].tokens == proposal.tokens


def test_rows_and_identity_are_the_networks() -> None:
    network = Network()
    found = LookupFirst(network)
    found.write_rows([], torch.zeros(3, 2, 4), ROWS)
    assert network.written == 3
    for name in ("drafter_id", "target_layers", "block_len", "draft_width"):
        assert getattr(found, name) == getattr(network, name)
