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
from train.draft_attention import attend
from train.draft_loss import SLACK_MAX, Aim, Vocabulary, block_loss
from train.draft_network import W1, W2, DraftNetwork, bigram_factors, initial, widen
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


def aim(vocab: int, blocks: int, slots: int, states: torch.Tensor, ce_share: float) -> Aim:
    return Aim(
        states=states,
        drawn=torch.randint(vocab, (blocks, slots)),
        weights=torch.rand(blocks, slots, dtype=states.dtype),
        greedy=torch.arange(blocks) % 2 == 1,
        sharpness=torch.where(torch.arange(blocks) % 2 == 1, 2.0, 1.0).to(states.dtype),
        ce_share=ce_share,
        floor=0.1,
    )


@pytest.mark.parametrize("ce_share", [0.0, 0.4, 1.0])
def test_the_loss_is_the_plain_one(ce_share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.draft_loss.SLICE", 6)
    torch.manual_seed(0)
    blocks, slots, rank, sure, drawn = 5, 3, 7, 20, 10
    hidden, states = (torch.randn(blocks, slots, HIDDEN).double() for _ in range(2))
    head = torch.randn(sure + drawn, HIDDEN).double() / 2
    markov, w2 = torch.randn(blocks, slots, rank).double(), torch.randn(sure + drawn, rank).double()
    standing = torch.cat([torch.zeros(sure), torch.full((drawn,), math.log(4.0))]).double()
    for value in (hidden, markov, w2):
        value.requires_grad_()
    vocabulary = Vocabulary(head=head, w2=w2, standing=standing, sure=sure, index=torch.arange(sure))
    against = aim(sure, blocks, slots, states, ce_share)
    got = block_loss(hidden, markov, vocabulary, against)
    got_grads = torch.autograd.grad(got.total, [hidden, markov, w2])

    # A token that stands for four is four tokens, each with a quarter of it.
    copies = torch.cat([torch.arange(sure), torch.arange(sure, sure + drawn).repeat(4)])
    sharp = against.sharpness[:, None, None]
    logs_of_law = ((states @ head.T) * sharp)[..., copies].log_softmax(-1)
    logits = (hidden @ head.T + markov @ w2.T) * sharp
    logs = logits[..., copies].log_softmax(-1)
    law, p = logs_of_law.exp(), logs.exp()
    at = against.drawn[..., None]
    ratios = (logs.gather(-1, at) - logs_of_law.gather(-1, at))[..., 0].detach()
    total = torch.zeros(())
    for block in range(blocks):
        running = least = 1.0  # R and M
        for slot in range(slots):
            slack = 1.0 if against.greedy[block] else min(running / least, SLACK_MAX)
            lost = 2 * (1 - torch.minimum(law[block, slot], slack * p[block, slot]).sum())
            entropy = -(law[block, slot] * logs[block, slot]).sum()
            weight = against.weights[block, slot] * (0.1 + 0.9 * least)
            total = total + weight * (ce_share * entropy + (1 - ce_share) * lost)
            assert float(got.reach[block, slot]) == pytest.approx(least)
            running *= math.exp(ratios[block, slot])
            least = min(least, running)
    torch.testing.assert_close(got.total, total.to(got.total.dtype))
    for mine, plain in zip(got_grads, torch.autograd.grad(total, [hidden, markov, w2]), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got.overlap, torch.minimum(p, law).sum(-1).detach())
    assert torch.equal(got.matched, logits[..., :sure].argmax(-1) == against.drawn)


def test_without_cross_entropy_the_loss_is_what_verification_refuses() -> None:
    """Over texts drawn from the target: twice the slots of a block less the tokens that it keeps on average."""
    torch.manual_seed(0)
    slots, vocab, texts = 3, 6, 20_000
    target, drafter = (torch.randn(slots, vocab).double() for _ in range(2))
    drawn = torch.multinomial(target.softmax(-1), texts, replacement=True).T
    vocabulary = Vocabulary(
        head=torch.eye(vocab).double(), w2=torch.zeros(vocab, 1).double(), standing=torch.zeros(vocab).double(),
        sure=vocab, index=torch.arange(vocab),
    )  # fmt: skip
    against = Aim(
        states=target.expand(texts, -1, -1), drawn=drawn, weights=torch.full((texts, slots), 1 / texts).double(),
        greedy=torch.zeros(texts, dtype=torch.bool), sharpness=torch.ones(texts).double(), ce_share=0.0, floor=0.0,
    )  # fmt: skip
    got = block_loss(drafter.expand(texts, -1, -1), torch.zeros(texts, slots, 1).double(), vocabulary, against)
    ratios = (drafter.log_softmax(-1) - target.log_softmax(-1)).gather(1, drawn.T).T
    reached = got.reach.sum() / texts  # M of every slot, which 1 - loss / 2 of a block is a share of
    kept = ratios.cumsum(1).cummin(1).values.clamp(max=0.0).exp().sum(1).mean()
    assert float(reached - got.total / 2) == pytest.approx(float(kept), abs=0.02)


def test_blocks_attend_to_what_stands_before_them() -> None:
    """Values and gradients against one plain softmax over both kinds of keys."""
    torch.manual_seed(0)
    sequences, heads, anchors, slots, tokens = 2, 2, 3, 4, 9
    own = (sequences, heads, anchors, slots)
    query, own_keys, own_values = (torch.randn(*own, width).requires_grad_() for width in (5, 5, 6))
    keys, values = (torch.randn(sequences, heads, tokens, width).requires_grad_() for width in (5, 6))
    places, weights = torch.tensor([[3, 7, 0], [9, 2, 5]]), torch.randn(*own, 6)
    inputs = (query, keys, values, own_keys, own_values)
    unseen = (torch.arange(tokens) >= places[..., None])[:, None, :, None]
    far = torch.einsum("nhasd,nhtd->nhast", query, keys).masked_fill(unseen, -torch.inf)
    shares = torch.cat([far, query @ own_keys.mT], -1).softmax(-1)
    plain = torch.einsum("nhast,nhtd->nhasd", shares[..., :tokens], values) + shares[..., tokens:] @ own_values
    got = attend(*inputs, places)
    torch.testing.assert_close(got, plain)
    both = (torch.autograd.grad((out * weights).sum(), inputs) for out in (got, plain))
    for mine, want in zip(*both, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)


def test_a_part_of_the_vocabulary_gives_the_law_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many draws of the tokens that stand for the others, distance and matches are those over all tokens."""
    torch.manual_seed(0)
    vocab, slots = 400, 6
    head, w2 = 0.5 * torch.randn(vocab, HIDDEN), 0.3 * torch.randn(vocab, 3)
    hidden, markov, states = torch.randn(slots, HIDDEN), torch.randn(slots, 3), torch.randn(slots, HIDDEN)
    likeliest = (states @ head.T).topk(8).indices.flatten()

    def total(others: int, seed: int) -> float:
        monkeypatch.setattr("train.draft_trainer.OTHERS", others)
        tokens = vocabulary(likeliest, head, w2, seed)
        against = Aim(
            states=states[:, None], drawn=tokens.index[likeliest[::8, None]],
            weights=torch.full((slots, 1), 1 / slots), greedy=torch.zeros(slots, dtype=torch.bool),
            sharpness=torch.ones(slots), ce_share=0.2, floor=0.1,
        )  # fmt: skip
        return float(block_loss(hidden[:, None], markov[:, None], tokens, against).total)

    whole = total(vocab, 0)
    found = [total(100, seed) for seed in range(40)]
    assert max(abs(value - whole) for value in found) < 0.2
    assert abs(sum(found) / len(found) - whole) < 0.02
    assert abs(total(0, 0) - whole) > 0.1, "what is left out would count"


def test_a_wider_drafter_starts_as_the_one_that_it_goes_on_from() -> None:
    torch.manual_seed(0)
    small, embedding, head = random_params(1), torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    wide_config = replace(config(), intermediate=40, markov_rank=11)
    wide = initial(wide_config, torch.ones(HIDDEN), 0)
    widen(wide, small)
    taps = torch.randn(6, TAPS, HIDDEN)
    drafts = [
        of.draft(7, 6, of.context_rows(taps, 0), 4, lambda slot, logits: int(logits.argmax()))
        for of in (Drafter(config(), small, embedding, head), Drafter(wide_config, wide, embedding, head))
    ]
    assert drafts[0].tokens == drafts[1].tokens
    torch.testing.assert_close(drafts[0].logits, drafts[1].logits)
    assert drafts[0].confidence == pytest.approx(drafts[1].confidence)
    assert float(wide["layers.0.mlp.up_proj.weight"][24:].abs().min()) > 0, "else nothing new could be learnt"


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
