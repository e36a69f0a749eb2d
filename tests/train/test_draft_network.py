"""The trained network is the served one, and its loss has the gradient that plain autograd gives."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model.drafter.config import DrafterConfig, Rope
from model.drafter.network import Drafter
from train.draft_loss import Vocabulary, overlap_loss
from train.draft_network import W1, W2, DraftNetwork, bigram_factors, initial
from train.draft_trainer import vocabulary

VOCAB, HIDDEN, TAPS = 50, 16, 2


def config() -> DrafterConfig:
    return DrafterConfig(
        form="dspark", dtype="bfloat16", hidden=HIDDEN, intermediate=24, layers=2, heads=2, eps=1e-5, vocab=VOCAB,
        target_layers=(1, 2), mask_id=5, block_len=5, rope=Rope(dim=4, theta=1e4), windows=(None, None), q_lora=6,
        kv_lora=8, nope=4, v_dim=6, markov_rank=7, confidence=True, confidence_sees_markov=True,
    )  # fmt: skip


def random_params(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        name: value + 0.2 * torch.randn_like(value)
        for name, value in initial(config(), torch.ones(HIDDEN), 0).items()
    }


@pytest.mark.parametrize("slots", [1, 3, 5])
def test_the_trained_network_drafts_what_the_served_one_does(slots: int) -> None:
    """Several anchors of padded sequences at once, against one block at a time."""
    torch.manual_seed(slots)
    params, embedding, head = random_params(0), torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    served = Drafter(config(), params, embedding, head)
    lengths, taps = (9, 14), torch.randn(2, 14, TAPS, HIDDEN)
    places = torch.tensor([[3, 9, 1], [14, 6, 5]])
    anchors = torch.randint(VOCAB, places.shape)
    padded = taps.clone()
    padded[0, lengths[0] :] = 0.0
    hidden = DraftNetwork(config(), embedding).hidden(params, padded, anchors, places, slots)
    for row, length in enumerate(lengths):
        for column, place in enumerate(places[row].tolist()):
            assert place <= length
            rows = served.context_rows(taps[row, :place], 0)
            anchor = int(anchors[row, column])
            draft = served.draft(anchor, place, rows, slots, lambda slot, logits: int(logits.argmax()))
            before = torch.tensor([anchor, *draft.tokens[:-1]])
            logits = F.linear(hidden[row, column], head) + params[W1][before] @ params[W2].T
            torch.testing.assert_close(logits, draft.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ce_share", [0.0, 0.4, 1.0])
def test_the_loss_is_the_plain_one(ce_share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.draft_loss.SLICE", 4)
    torch.manual_seed(0)
    slots, rank, sure, drawn = 11, 7, 20, 10
    hidden, states, head = (torch.randn(n, HIDDEN).double() for n in (slots, slots, sure + drawn))
    markov, w2 = torch.randn(slots, rank).double(), torch.randn(sure + drawn, rank).double()
    weights, sharpness = torch.rand(slots).double(), torch.tensor([1.0, 2.0]).double().repeat(6)[:slots]
    standing = torch.cat([torch.zeros(sure), torch.full((drawn,), math.log(4.0))]).double()
    for value in (hidden, markov, w2):
        value.requires_grad_()
    vocabulary = Vocabulary(head=head, w2=w2, standing=standing, sure=sure)
    got = overlap_loss(hidden, markov, vocabulary, states, sharpness, weights, ce_share)
    got_grads = torch.autograd.grad(got.total, [hidden, markov, w2])

    # A token that stands for four is four tokens, each with a quarter of it.
    copies = torch.cat([torch.arange(sure), torch.arange(sure, sure + drawn).repeat(4)])
    sharp = sharpness[:, None]
    law = ((states @ head.T) * sharp)[:, copies].softmax(-1)
    logits = (hidden @ head.T + markov @ w2.T) * sharp
    logs = logits[:, copies].log_softmax(-1)
    each = ce_share * -(law * logs).sum(-1) + (1 - ce_share) * (logs.exp() - law).abs().sum(-1)
    want = (each * weights).sum()
    torch.testing.assert_close(got.total, want)
    for mine, plain in zip(got_grads, torch.autograd.grad(want, [hidden, markov, w2]), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got.overlap, torch.minimum(logs.exp(), law).sum(-1).detach())
    likeliest = (states @ head.T)[:, :sure].argmax(-1)
    assert torch.equal(got.matched, logits[:, :sure].argmax(-1) == likeliest)


def test_a_part_of_the_vocabulary_gives_the_law_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many draws of the tokens that stand for the others, distance and matches are those over all tokens."""
    torch.manual_seed(0)
    vocab, slots = 400, 6
    head, w2 = 0.5 * torch.randn(vocab, HIDDEN), 0.3 * torch.randn(vocab, 3)
    hidden, markov, states = torch.randn(slots, HIDDEN), torch.randn(slots, 3), torch.randn(slots, HIDDEN)
    weights, sharpness = torch.full((slots,), 1 / slots), torch.ones(slots)
    likeliest = (states @ head.T).topk(8).indices.flatten()

    def total(others: int, seed: int) -> float:
        monkeypatch.setattr("train.draft_trainer.OTHERS", others)
        tokens = vocabulary(likeliest, head, w2, seed)
        return float(overlap_loss(hidden, markov, tokens, states, sharpness, weights, 0.2).total)

    whole = total(vocab, 0)
    found = [total(100, seed) for seed in range(40)]
    assert max(abs(value - whole) for value in found) < 0.2
    assert abs(sum(found) / len(found) - whole) < 0.02
    assert abs(total(0, 0) - whole) > 0.1, "what is left out would count"


def test_the_markov_head_starts_as_the_bigrams() -> None:
    rng = np.random.default_rng(0)
    odds = rng.normal(size=(VOCAB, 3)) @ rng.normal(size=(3, VOCAB))
    counts = rng.poisson(40 * np.exp(odds - odds.max(1, keepdims=True) + 2))
    w1, w2 = bigram_factors(counts, VOCAB, 0)
    frequent = counts > 20
    share = counts.sum(0) / counts.sum()
    want = 0.5 * np.log(np.maximum(counts, 1) / counts.sum(1, keepdims=True) / share)
    found = (w1 @ w2.T).numpy()
    assert np.abs(found - want)[frequent].mean() < 0.1
    assert math.isfinite(float(np.abs(found).max()))


def test_only_dsparks_form_is_trained() -> None:
    with pytest.raises(ValueError, match="DSpark"):
        DraftNetwork(replace(config(), confidence_sees_markov=False), torch.zeros(VOCAB, HIDDEN))
