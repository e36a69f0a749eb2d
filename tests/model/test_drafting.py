"""Drafters over the paged pool: what they propose is the plain drafter's, whatever the blocks and the batch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from model.batch import PoolLayout, Segment
from model.drafter.config import parse_drafter_config
from model.drafter.network import Drafter
from model.drafter.paged import TorchDraftModel, draw
from model.drafting import DraftModel, DraftRequest, Proposal
from model.native.drafter import NativeDraftModel
from moonrelay.errors import InvariantError
from tests.model.runs import backend
from tests.model.test_drafter import WHERE, random_tensors, small, target

BLOCK_TOKENS, NUM_BLOCKS = 8, 24
KINDS = ("torch", "native", "bytes")  # "native" keeps weights as stored, as its twin does
FORMS = [("torch", "dspark"), ("torch", "dflash"), ("native", "dspark")]


class Draftee:
    """A drafter with its pool, plainly drafted context beside it. Taps have the size of trained ones."""

    def __init__(self, kind: str, form: str, *, poison: str | None = None, row: int | slice = slice(None)) -> None:
        self.config = parse_drafter_config(small(form), target(), path=WHERE)
        rng = torch.Generator().manual_seed(4)
        self.embedding, self.head = (
            torch.randn(self.config.vocab, self.config.hidden, generator=rng) for _ in range(2)
        )
        tensors = random_tensors(self.config)
        if poison is not None:
            tensors[poison][row] *= float("nan")
        self.plain = Drafter(self.config, tensors, self.embedding, self.head)
        layout = target().pool_layout(BLOCK_TOKENS)
        self.model = self.make(kind, tensors, layout)
        self.layout = replace(layout, draft_width=self.model.draft_width)
        self.rows = torch.full((NUM_BLOCKS, self.layout.block_floats), float("nan"))
        self.free = list(range(NUM_BLOCKS))
        random.Random(6).shuffle(self.free)
        self.rng = rng

    def make(self, kind: str, tensors: dict[str, torch.Tensor], layout: PoolLayout) -> DraftModel:
        if kind == "torch":
            return TorchDraftModel(self.plain, "name", layout)
        backend("k3_tiny_mxfp4", "native")  # skips only without a compiler
        shared = (self.embedding, self.head)
        return NativeDraftModel(self.config, tensors, *shared, "name", layout, exact=kind == "native")

    def blocks(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // BLOCK_TOKENS))]

    def taps(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, len(self.config.target_layers), self.config.hidden, generator=self.rng)

    def segment(self, blocks: list[int], start: int, tokens: int) -> Segment:
        return Segment(ids=[0] * tokens, start=start, slot=0, blocks=blocks)

    def expected(self, request: DraftRequest, context: torch.Tensor) -> tuple[list[int], torch.Tensor, list[float]]:
        told: list[int] = []

        def choose(slot: int, logits: torch.Tensor) -> int:
            if slot < len(request.guess) and told == list(request.guess[:slot]):
                logits[request.guess[slot]] += request.more[slot] * (request.temperature or 1.0)
            told.append(chosen(slot, logits))
            return told[-1]

        def chosen(slot: int, logits: torch.Tensor) -> int:
            if request.temperature == 0:
                return int(logits.argmax())
            return draw((logits / request.temperature).softmax(-1), request.uniforms[slot])

        made = self.plain.draft(
            request.anchor, request.position, context, request.length, choose, first=request.first
        )
        own = (made.logits / (request.temperature or 1.0)).softmax(-1).amax(-1)
        return made.tokens, made.logits, made.confidence or own.tolist()


def requests(draftee: Draftee, seed: int, positions: list[int]) -> tuple[list[DraftRequest], list[torch.Tensor]]:
    """Rows written in pieces, side by side; half of the requests know only a part of their context."""
    rng, guesses = random.Random(seed), random.Random(seed)
    config = draftee.config
    made, contexts = [], []
    for i, position in enumerate(positions):
        blocks = draftee.blocks(position + 1)
        taps = draftee.taps(position)
        cut = rng.randint(0, position)
        for start, end in ((0, cut), (cut, position)):
            if start < end:
                draftee.model.write_rows([draftee.segment(blocks, start, end - start)], taps[start:end], draftee.rows)
        first = 0 if i % 2 else rng.randint(0, position)
        length = rng.randint(1, config.block_len)
        guess = [guesses.randrange(config.vocab) for _ in range(guesses.randint(0, length))]
        request = DraftRequest(
            anchor=rng.randrange(config.vocab), position=position, blocks=blocks, first=first, length=length,
            temperature=rng.choice([0.0, 0.3, 1.0]), uniforms=[rng.random() for _ in range(length)],
            guess=guess, more=[guesses.choice([0.5, 4.0, 60.0]) for _ in guess],
        )  # fmt: skip
        made.append(request)
        contexts.append(draftee.plain.context_rows(taps, 0)[:, first:])
    return made, contexts


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_paged_drafts_are_the_plain_ones(kind: str, form: str) -> None:
    draftee = Draftee(kind, form)
    asked, contexts = requests(draftee, 1, [0, 1, 7, 8, 9, 30, 41])
    for request, context, found in zip(asked, contexts, draftee.model.draft(asked, draftee.rows), strict=True):
        tokens, logits, confidence = draftee.expected(request, context)
        assert found.tokens == tokens
        assert found.confidence == pytest.approx(confidence, abs=1e-5)
        if request.temperature == 0:
            assert found.laws is None
        else:
            assert found.laws is not None
            torch.testing.assert_close(torch.from_numpy(found.laws), (logits / request.temperature).softmax(-1))


@pytest.mark.parametrize(("kind", "form"), [*FORMS, ("bytes", "dspark")])
def test_a_draft_does_not_depend_on_its_batch(kind: str, form: str) -> None:
    draftee = Draftee(kind, form)
    asked, _ = requests(draftee, 2, [3, 12, 20, 0])
    together = draftee.model.draft(asked, draftee.rows)
    for request, found in zip(asked, together, strict=True):
        (alone,) = draftee.model.draft([request], draftee.rows)
        assert (alone.tokens, alone.confidence) == (found.tokens, found.confidence)
        assert (alone.laws is None) == (found.laws is None)
        assert alone.laws is None or (alone.laws == found.laws).all()


def test_rounded_heads_stay_close_to_the_exact_laws() -> None:
    """At a temperature that leaves scores of about one: slot by slot, while the drawn tokens agree."""
    exact, rounded = Draftee("native", "dspark"), Draftee("bytes", "dspark")
    compared = 0
    for seed in range(4):
        asked, _ = requests(exact, seed, [5, 11, 2])
        rounded.rows[:] = exact.rows
        soft = {"temperature": exact.config.hidden**0.5, "guess": (), "more": ()}
        asked = [replace(r, length=4, uniforms=[0.1, 0.4, 0.6, 0.9], **soft) for r in asked]
        exact.free = list(range(NUM_BLOCKS))
        pairs = zip(exact.model.draft(asked, exact.rows), rounded.model.draft(asked, rounded.rows), strict=True)
        for one, other in pairs:
            assert one.laws is not None and other.laws is not None
            for slot in range(4):
                if one.tokens[:slot] != other.tokens[:slot]:
                    break
                compared += 1
                assert 0.5 * abs(one.laws[slot] - other.laws[slot]).sum() < 0.02
                assert other.confidence[slot] == pytest.approx(one.confidence[slot], abs=0.02)
    assert compared > 12


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_several_segments_leave_everything_else_alone(kind: str) -> None:
    draftee = Draftee(kind, "dspark")
    first, second = draftee.blocks(20), draftee.blocks(20)
    taps = draftee.taps(5 + 9)
    segments = [draftee.segment(first, 6, 5), draftee.segment(second, 0, 9)]
    draftee.model.write_rows(segments, taps, draftee.rows)
    own = draftee.rows[:, draftee.layout.mla_floats :].view(
        NUM_BLOCKS, draftee.config.layers, BLOCK_TOKENS, draftee.config.row_width
    )
    for segment, share in zip(segments, taps.split([5, 9]), strict=True):
        wanted = draftee.plain.context_rows(share, segment.start)
        for i in range(len(segment.ids)):
            block, offset = divmod(segment.start + i, BLOCK_TOKENS)
            found = own[segment.blocks[block], :, offset]
            if kind == "bytes":
                assert ((found - wanted[:, i]).norm(dim=-1) < 0.05 * wanted[:, i].norm(dim=-1)).all()
            else:
                torch.testing.assert_close(found, wanted[:, i], rtol=1e-4, atol=1e-5)
    assert int(draftee.rows.isfinite().sum()) == 14 * draftee.layout.draft_width


@pytest.mark.parametrize(
    ("kind", "form", "poison"),
    [
        ("torch", "dspark", "final_norm.weight"),
        ("torch", "dspark", "markov_head.markov_w2.weight"),
        ("torch", "dspark", "confidence_head.proj.bias"),
        ("torch", "dflash", "norm.weight"),
        ("native", "dspark", "final_norm.weight"),
        ("bytes", "dspark", "final_norm.weight"),
        ("native", "dspark", "markov_head.markov_w2.weight"),
        ("bytes", "dspark", "markov_head.markov_w2.weight"),
        ("native", "dspark", "confidence_head.proj.bias"),
        ("bytes", "dspark", "confidence_head.proj.bias"),
    ],
)
def test_no_draft_where_the_output_is_not_finite(kind: str, form: str, poison: str) -> None:
    draftee = Draftee(kind, form, poison=poison)
    asked, _ = requests(draftee, 3, [5, 9])
    for request in (asked[0], replace(asked[0], temperature=0.7), asked[1]):
        assert draftee.model.draft([request], draftee.rows) == [Proposal(tokens=[], confidence=[])]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_ends_before_the_slot_that_is_not_finite(kind: str, temperature: float) -> None:
    """Dropped whole, drafts with the token behind which nothing is finite would be kept less often than drawn."""
    whole = Draftee(kind, "dspark")

    def ask(draftee: Draftee) -> Proposal:
        (request,), _ = requests(draftee, 3, [9])
        size = draftee.config.block_len
        full = replace(request, length=size, temperature=temperature, uniforms=[0.37] * size)
        return draftee.model.draft([full], draftee.rows)[0]

    want = ask(whole)
    token = want.tokens[1]
    end = want.tokens.index(token) + 1
    assert end < len(want.tokens)
    cut = ask(Draftee(kind, "dspark", poison="markov_head.markov_w1.weight", row=token))
    assert (cut.tokens, cut.confidence) == (want.tokens[:end], want.confidence[:end])
    if temperature:
        assert cut.laws is not None and want.laws is not None and (cut.laws == want.laws[:end]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_out_of_bounds_are_refused(kind: str) -> None:
    draftee = Draftee(kind, "dspark")
    (good,), _ = requests(draftee, 4, [9])
    for change in (
        {"anchor": draftee.config.vocab},
        {"anchor": -1},
        {"length": 0},
        {"length": draftee.config.block_len + 1},
        {"position": 17},
        {"first": 10},
        {"first": -1},
        {"blocks": [NUM_BLOCKS, 0]},
        {"blocks": [-1, 0]},
        {"temperature": 1.0, "uniforms": []},
        {"guess": [draftee.config.vocab], "more": [1.0], "length": 1},
        {"guess": [-1], "more": [1.0], "length": 1},
        {"guess": [1, 2], "more": [1.0, 1.0], "length": 1},
        {"guess": [1], "more": [], "length": 1},
    ):
        with pytest.raises(InvariantError):
            draftee.model.draft([replace(good, **change)], draftee.rows)
    with pytest.raises(InvariantError):
        draftee.model.draft([good], draftee.rows[:, 1:].contiguous())
    with pytest.raises(InvariantError):
        draftee.model.write_rows([draftee.segment(list(good.blocks), 0, 3)], draftee.taps(2), draftee.rows)


def test_draws_invert_the_running_sum() -> None:
    law = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [draw(law, u) for u in (0.0, 0.2499, 0.25, 0.5, 1 - 1e-12)] == [1, 1, 3, 3, 3]
