"""Every operation gives a row the same bits alone, in any batch and on any number of threads; slow twins agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.ops import attnres, norm, pointwise
from model.ops.conv import naive as conv_naive
from model.ops.conv.shifted import short_conv
from model.ops.linear import naive as linear_naive
from model.ops.linear.padded import Matrix, linear, matmul, prepare, row_multiple
from model.ops.mla import naive as mla_naive
from model.ops.mla.paged import attend
from model.ops.moe import naive as moe_naive
from model.ops.moe.grouped import combine
from model.ops.moe.routing import route
from tests.golden import relative_error

pytestmark = pytest.mark.usefixtures("keep_threads")

seeds = st.integers(0, 2**31)
threads_any = st.integers(1, 4)
WIDTHS = st.sampled_from([1, 4, 8, 19, 20, 32, 36, 48, 88, 100, 160, 176, 272, 300])
rows_any = st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 129]))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pieces(total: int, seed: int) -> Iterator[slice]:
    """Cut [0, total) at random, so that rows meet every batch size and every place in a batch."""
    picker, begin = generator(seed), 0
    while begin < total:
        end = min(total, begin + int(torch.randint(1, 24, (1,), generator=picker)))
        yield slice(begin, end)
        begin = end


@settings(max_examples=60, deadline=None)
@given(seed=seeds, rows=rows_any, inner=WIDTHS, out=WIDTHS, threads=threads_any)
def test_linear(seed: int, rows: int, inner: int, out: int, threads: int) -> None:
    x = torch.randn(rows, inner, generator=generator(seed))
    weight = torch.randn(out, inner, generator=generator(seed + 1))
    torch.set_num_threads(1)
    want = linear(x, prepare(weight, row_multiple=row_multiple(1, invariant=True)))
    # Beside the size of what is added up: a sum that cancels is as wrong as its terms.
    exact, terms = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    assert ((want - exact).abs() <= 1e-6 * terms).all()
    torch.set_num_threads(threads)
    matrix = prepare(weight, row_multiple=row_multiple(threads, invariant=True))
    for cut in pieces(rows, seed):
        assert torch.equal(linear(x[cut], matrix), want[cut])


@settings(max_examples=40, deadline=None)
@given(
    seed=seeds,
    heads=st.integers(1, 6),
    rows=rows_any,
    inner=WIDTHS,
    out=WIDTHS,
    threads=threads_any,
)
def test_matmul_per_head(seed: int, heads: int, rows: int, inner: int, out: int, threads: int) -> None:
    a = torch.randn(heads, rows, inner, generator=generator(seed))
    b = torch.randn(heads, inner, out, generator=generator(seed + 1))
    torch.set_num_threads(1)
    want = matmul(a, b, row_multiple(1, invariant=True))
    assert relative_error(want, a.double() @ b.double()) < 1e-6
    torch.set_num_threads(threads)
    for cut in pieces(rows, seed):
        assert torch.equal(matmul(a[:, cut], b, row_multiple(threads, invariant=True)), want[:, cut])


def test_linear_twins_and_stacking() -> None:
    x = torch.randn(5, 40, generator=generator(2))
    first, second = torch.randn(12, 40, generator=generator(3)), torch.randn(7, 40, generator=generator(4))
    stacked = prepare(first, second.bfloat16(), row_multiple=4)
    assert (stacked.out, stacked.data.shape) == (19, (32, 40))
    both = linear(x, stacked)
    assert relative_error(both, linear_naive.linear(x, stacked)) < 1e-6
    assert relative_error(both[:, 12:], x @ second.bfloat16().float().t()) < 1e-6


@settings(max_examples=25, deadline=None)
@given(seed=seeds, rows=rows_any, width=WIDTHS, threads=threads_any)
def test_rowwise_operations(seed: int, rows: int, width: int, threads: int) -> None:
    x, y, z = 4 * torch.randn(3, rows, width, generator=generator(seed))
    weight = torch.randn(width, generator=generator(seed + 1))
    operations = {
        "sigmoid": lambda a, b, c: pointwise.sigmoid(a),
        "silu": lambda a, b, c: pointwise.silu(a),
        "softplus": lambda a, b, c: pointwise.softplus(a),
        "situ": lambda a, b, c: pointwise.situ_glu(a, b, 4.0, 25.0),
        "exp": lambda a, b, c: torch.exp(-a.abs()),
        "rms_norm": lambda a, b, c: norm.rms_norm(a, weight, 1e-5),
        "attnres": lambda a, b, c: attnres.mix([a, b, c], weight, 1e-5),
        "route": lambda a, b, c: torch.cat(route(a, weight, count=min(3, width), renormalize=True, scaling=2.5), -1),
    }
    for name, operation in operations.items():
        torch.set_num_threads(1)
        want = operation(x, y, z)
        torch.set_num_threads(threads)
        for cut in pieces(rows, seed):
            assert torch.equal(operation(x[cut].clone(), y[cut].clone(), z[cut].clone()), want[cut]), name


@settings(max_examples=10, deadline=None)
@given(seed=seeds, threads=threads_any)
def test_pointwise_functions_where_torch_splits_work_over_threads(seed: int, threads: int) -> None:
    x = 4 * torch.randn(150_001, generator=generator(seed))
    start = int(torch.randint(0, 1000, (1,), generator=generator(seed + 1)))
    for function in (pointwise.sigmoid, pointwise.silu, pointwise.softplus, torch.exp, torch.tanh):
        torch.set_num_threads(1)
        want = function(x)
        torch.set_num_threads(threads)
        assert torch.equal(function(x[start:].clone()), want[start:])


def test_pointwise_functions_are_what_they_are_called() -> None:
    x = torch.cat([torch.linspace(-120, 120, 1001), torch.tensor([0.0, -1e-8, 1e-8, 1e4, -1e4])])
    wide = x.double()
    close = {"rtol": 3e-7, "atol": 1e-36}  # silu is 0 where e^-x overflows, below -88
    torch.testing.assert_close(pointwise.sigmoid(x).double(), torch.sigmoid(wide), **close)
    torch.testing.assert_close(pointwise.silu(x).double(), torch.nn.functional.silu(wide), **close)
    torch.testing.assert_close(pointwise.softplus(x).double(), torch.nn.functional.softplus(wide), **close)
    situ = 4 * torch.tanh(wide / 4) * torch.sigmoid(wide) * 25 * torch.tanh(wide.flip(0) / 25)
    torch.testing.assert_close(pointwise.situ_glu(x, x.flip(0), 4.0, 25.0).double(), situ, rtol=1e-6, atol=1e-36)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, batch=st.integers(1, 8), tokens=st.integers(1, 70), threads=threads_any)
def test_short_conv(seed: int, batch: int, tokens: int, threads: int) -> None:
    x = torch.randn(batch, tokens, 36, generator=generator(seed))
    weight = torch.randn(36, 4, generator=generator(seed + 1))
    history = torch.randn(batch, 3, 36, generator=generator(seed + 2))
    torch.set_num_threads(threads)
    out, after = short_conv(x, weight, history)
    torch.set_num_threads(1)
    want, want_after = conv_naive.short_conv(x, weight, history)
    assert torch.equal(out, want)
    assert torch.equal(after, want_after)
    split = tokens // 2
    head, middle = short_conv(x[:1, :split], weight, history[:1])
    tail, end = short_conv(x[:1, split:], weight, middle)
    assert torch.equal(torch.cat([head, tail], 1), out[:1])
    assert torch.equal(end, after[:1])


@settings(max_examples=20, deadline=None)
@given(
    seed=seeds,
    tokens=st.integers(1, 400),
    heads=st.integers(1, 4),
    block_tokens=st.sampled_from([64, 128, 192]),
    threads=threads_any,
)
def test_paged_attention(seed: int, tokens: int, heads: int, block_tokens: int, threads: int) -> None:
    """Any cut and any block size give a query the same bits; rows past the end may hold anything."""
    rank, width = 20, 28
    q = torch.randn(tokens, heads, width, generator=generator(seed))
    rows = torch.randn(tokens, width, generator=generator(seed + 1))
    num_blocks = -(-tokens // block_tokens)
    blocks = torch.randperm(num_blocks + 1, generator=generator(seed))[:num_blocks]
    pool = torch.full((num_blocks + 1, block_tokens, width), float("nan"))
    position = torch.arange(tokens)
    pool[blocks[position // block_tokens], position % block_tokens] = rows
    torch.set_num_threads(1)
    shape = {"rank": rank, "scale": 0.3}
    one_page = torch.zeros(1, -(-tokens // 64) * 64, width)
    one_page[0, :tokens] = rows
    multiple = row_multiple(1, invariant=True)
    want = attend(q, one_page, torch.tensor([0]), start=0, row_multiple=multiple, **shape)
    torch.set_num_threads(threads)
    multiple = row_multiple(threads, invariant=True)
    for cut in pieces(tokens, seed):
        got = attend(q[cut], pool, blocks, start=cut.start, row_multiple=multiple, **shape)
        assert torch.equal(got, want[cut])
    last = slice(max(0, tokens - 5), tokens)
    naive = mla_naive.attend(q[last], one_page, torch.tensor([0]), start=last.start, row_multiple=1, **shape)
    assert relative_error(want[last], naive) < 2e-6


def test_attention_survives_scores_that_overflow_a_plain_exponential() -> None:
    q, rows = torch.full((1, 1, 8), 30.0), torch.randn(300, 8, generator=generator(5))
    pool = torch.zeros(5, 64, 8)
    pool.view(-1, 8)[:300] = rows
    order = torch.arange(5)
    out = attend(q, pool, order, start=299, rank=8, scale=1.0, row_multiple=4)
    scores = (rows.double() @ q.double().view(8)).softmax(0)
    assert relative_error(out.view(8), scores @ rows.double()) < 2e-5


@settings(max_examples=12, deadline=None)
@given(seed=seeds, tokens=rows_any, threads=threads_any)
def test_experts(seed: int, tokens: int, threads: int) -> None:
    experts, count, size, inner = 7, 3, 36, 20
    x = torch.randn(tokens, size, generator=generator(seed))
    logits = torch.randn(tokens, experts, generator=generator(seed + 1))
    up = torch.randn(experts, 2 * inner, size, generator=generator(seed + 2))
    down = torch.randn(experts, size, inner, generator=generator(seed + 3))
    chosen, weights = route(logits, torch.zeros(experts), count=count, renormalize=True, scaling=1.0)

    def matrices(multiple: int) -> tuple[list[Matrix], list[Matrix]]:
        return tuple([prepare(w, row_multiple=multiple) for w in stack] for stack in (up, down))

    torch.set_num_threads(1)
    want = combine(x, chosen, weights, *matrices(row_multiple(1, invariant=True)), pointwise.silu_glu)
    torch.set_num_threads(threads)
    ready = matrices(row_multiple(threads, invariant=True))
    for cut in pieces(tokens, seed):
        assert torch.equal(combine(x[cut], chosen[cut], weights[cut], *ready, pointwise.silu_glu), want[cut])
    naive = moe_naive.combine(x[:4], chosen[:4], weights[:4], *matrices(1), pointwise.silu_glu)
    assert relative_error(want[:4], naive) < 1e-6


def test_routing_selects_with_the_bias_and_weighs_without_it() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    bias = torch.tensor([-1.0, 0.0, 0.0, 0.5])
    chosen, weights = route(logits, bias, count=2, renormalize=True, scaling=1.5)
    assert chosen.tolist() == [[2, 3], [1, 3]]  # ties (1 and 2 in the second row) go to the lower index
    scores = torch.sigmoid(logits[0, [2, 3]])
    torch.testing.assert_close(weights[0], 1.5 * scores / scores.sum())
    _, raw = route(logits, bias, count=2, renormalize=False, scaling=1.0)
    torch.testing.assert_close(raw[0], scores)


def test_attention_residuals_score_normed_vectors_and_mix_raw_ones() -> None:
    sources = list(torch.randn(4, 6, 32, generator=generator(9)) * torch.tensor([1.0, 9.0, 0.1, 3.0])[:, None, None])
    weight = torch.randn(32, generator=generator(10))
    stack = torch.stack(sources).double()
    normed = stack / (stack.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    shares = (normed @ weight.double()).softmax(0)
    want = (shares[..., None] * stack).sum(0)
    assert relative_error(attnres.mix(sources, weight, 1e-5), want) < 1e-6
