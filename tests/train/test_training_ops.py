"""Training's own operations against their slow twins, gradients included."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from train import attention, kda, loops
from train.checkpoint import mxfp4_unpack
from train.experts import grouped_mm, mxfp4_pack, mxfp4_round, permute_rows
from train.loss import cross_entropy

TOLERANCE = 1e-5  # relative L2; fp32 against fp32 in another order
# The tiles get a log-decay's gradient as a difference of two nearly equal sums, so it keeps fewer digits.
DECAY_TOLERANCE = 2e-4


def error(got: Tensor, want: Tensor) -> float:
    return float(((got - want).norm() / want.norm().clamp(min=1e-30)).detach())


def assert_same(
    fast: Callable[..., Tensor], slow: Callable[..., Tensor], inputs: Sequence[Tensor], loose: int | None = None
) -> None:
    """Values and every input's gradient, under a random cotangent; `loose` is the log-decay's place, if any."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    want = slow(*inputs)
    cotangent = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, inputs, cotangent)
    got = fast(*inputs)
    got_grads = torch.autograd.grad(got, inputs, cotangent)
    assert error(got, want) < TOLERANCE
    for place, (got_grad, want_grad) in enumerate(zip(got_grads, want_grads, strict=True)):
        assert error(got_grad, want_grad) < (DECAY_TOLERANCE if place == loose else TOLERANCE), place


@pytest.mark.parametrize("spread", [1.0, 6.0], ids=["usual gates", "gates at both bounds"])
@pytest.mark.parametrize("length", [32, 160])
def test_tiled_kda_equals_the_recurrence(spread: float, length: int) -> None:
    torch.manual_seed(length)
    batch, heads, key, value = 2, 3, 16, 8
    q = F.normalize(torch.randn(batch, length, heads, key), dim=-1)
    k = F.normalize(torch.randn(batch, length, heads, key), dim=-1)
    v = torch.randn(batch, length, heads, value)
    g = -5.0 * torch.sigmoid(spread * torch.randn(batch, length, heads, key))
    beta = torch.sigmoid(torch.randn(batch, length, heads))
    assert_same(kda.tiled, kda.naive, (q, k, v, g, beta), loose=3)


def test_tiled_kda_survives_a_gate_that_stays_at_the_bound() -> None:
    torch.manual_seed(0)
    q, k, v = (F.normalize(torch.randn(1, 96, 2, 8), dim=-1) for _ in range(3))
    g = torch.full_like(q, -5.0)
    assert_same(kda.tiled, kda.naive, (q, k, v, g, torch.full((1, 96, 2), 0.5)), loose=3)


@pytest.mark.parametrize("length", [5, 256, 300])
def test_attention_sees_its_document_only(length: int) -> None:
    torch.manual_seed(length)
    first = torch.zeros(2, length, dtype=torch.int64)
    first[1, length // 3 :] = length // 3
    first[1, length - 1 :] = length - 1
    q, k, v = torch.randn(2, 3, length, 12), torch.randn(2, 3, length, 12), torch.randn(2, 3, length, 7)
    assert_same(lambda *x: attention.causal_attention(*x, first)[0], lambda *x: attention.naive(*x, first), (q, k, v))


def test_grouped_mm_equals_one_matrix_at_a_time() -> None:
    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 5, 1])
    owner = torch.repeat_interleave(torch.arange(4), counts)
    assert_same(
        lambda rows, weight: grouped_mm(rows, weight, counts),
        lambda rows, weight: torch.einsum("mi,moi->mo", rows, weight[owner]),
        (torch.randn(9, 6), torch.randn(4, 5, 6)),
    )


def test_permuted_rows_and_their_gradient() -> None:
    order = torch.tensor([2, 0, 3, 1])
    inverse = torch.argsort(order)
    assert_same(lambda x: permute_rows(x, order, inverse), lambda x: x[order], (torch.randn(4, 3),))


def test_cross_entropy_equals_torch_under_weights() -> None:
    torch.manual_seed(0)
    targets, weights = torch.randint(0, 50, (600,)), torch.rand(600)
    assert_same(
        lambda hidden, head: cross_entropy(hidden, head, targets, weights)[0],
        lambda hidden, head: (F.cross_entropy(hidden @ head.mT, targets, reduction="none") * weights).sum(),
        (torch.randn(600, 8), torch.randn(50, 8)),
    )


def test_an_unwanted_token_is_pushed_down() -> None:
    """A negative weight: the gradient of log(1 - p), as autograd has it."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 8, generator=rng).requires_grad_()
    head = torch.randn(12, 8, generator=rng).requires_grad_()
    targets, weights = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([1.0, -1.0, 0.0, -0.5, 2.0, -1.0])
    loss, losses = cross_entropy(hidden, head, targets, weights)
    grads = torch.autograd.grad(loss, (hidden, head))
    chance = (hidden @ head.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    plain = torch.where(weights < 0, torch.log1p(-chance.exp()), -chance)
    torch.testing.assert_close(losses, plain)
    for found, wanted in zip(grads, torch.autograd.grad((plain * weights).sum(), (hidden, head)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_goes_round_is_found_at_its_third_time() -> None:
    assert not any(loops.repeats(list(range(50))))
    assert not any(loops.repeats([*range(10), *range(10)]))
    found = loops.repeats([9, *[1, 2, 3] * 5])
    assert found.index(True) == 1 + 6 + 2 * 3 - 1 and all(found[found.index(True) :])


def test_what_is_packed_is_bit_for_bit_what_was_trained() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 16, 96) * torch.logspace(-6, 6, 48).reshape(3, 16, 1)
    weight[0, 0, :32] = 0.0
    rounded = mxfp4_round(weight)
    assert torch.equal(mxfp4_unpack(*mxfp4_pack(weight)), rounded)
    assert torch.equal(mxfp4_round(rounded), rounded)


def test_rounding_goes_to_the_nearest_value_and_ties_to_the_even_code() -> None:
    group = torch.zeros(32)
    group[:10] = torch.tensor([6.0, -0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.1])
    want = torch.zeros(32)
    want[:10] = torch.tensor([6.0, -0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -6.0])
    assert torch.equal(mxfp4_round(group[None])[0], want)
