"""The gated delta rule's forms against the golden calls, against each other, and at the gates' extremes."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.ops.kda import chunk, naive, recurrent
from model.ops.kda.gates import log_decay
from tests.golden import golden_tensors, relative_error

TOLERANCE = 5e-6  # suggested beside the data
EPS = 1e-6
FORMS = {"naive": naive.gated_delta, "chunk": chunk.gated_delta, "recurrent": recurrent.gated_delta}
Delta = Callable[..., tuple[torch.Tensor, torch.Tensor]]
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@cache
def golden_case(case: int) -> dict[str, torch.Tensor]:
    prefix = f"case{case}."
    return {name[len(prefix) :]: t for name, t in golden_tensors("kda_op").items() if name.startswith(prefix)}


def operands(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[name][None] for name in ("q", "k", "v", "g", "beta")]


def random_operands(
    seed: int, batch: int, tokens: int, heads: int, key: int, value: int, decay: float = 5.0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Operands and a state; log decays are spread over (-decay, 0)."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, batch, tokens, heads, key, generator=generator)
    v = torch.randn(batch, tokens, heads, value, generator=generator)
    g = -decay * torch.rand(batch, tokens, heads, key, generator=generator)
    beta = torch.rand(batch, tokens, heads, generator=generator)
    return [q, k, v, g, beta], torch.randn(batch, heads, key, value, generator=generator)


def in_float64(args: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An independent recurrence in fp64 over [B,T,H,...]; the decay applies first, the output sees the update."""
    q, k, v, g, beta = (t.double() for t in args)
    q = q / (q.square().sum(-1, keepdim=True) + EPS).sqrt() * q.shape[-1] ** -0.5
    k = k / (k.square().sum(-1, keepdim=True) + EPS).sqrt()
    s, outs = state.double(), []
    for t in range(q.shape[1]):
        s = g[:, t, :, :, None].exp() * s
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t])
        s = s + torch.einsum("bhk,bhv,bh->bhkv", k[:, t], error, beta[:, t])
        outs.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return torch.stack(outs, 1), s


def test_the_forms_have_one_signature() -> None:
    assert len({str(inspect.signature(form)) for form in FORMS.values()}) == 1


@pytest.mark.parametrize("case", range(8))
@each_form
def test_golden_calls(form: Delta, case: int) -> None:
    tensors = golden_case(case)
    args, final = operands(tensors), tensors["final_state"]
    start = tensors.get("initial_state", torch.zeros_like(final))[None]
    out, state = form(*args, state=start, l2_eps=EPS)
    assert relative_error(out[0], tensors["o"]) < TOLERANCE
    assert relative_error(state[0], final) < TOLERANCE
    for name in tensors:
        if name.startswith("state_after_"):
            tokens = int(name.removeprefix("state_after_"))
            _, state = form(*[t[:, :tokens] for t in args], state=start, l2_eps=EPS)
            assert relative_error(state[0], tensors[name]) < TOLERANCE, name


def test_golden_has_the_layouts_that_a_transposed_state_would_betray() -> None:
    assert sum(golden_case(case)["q"].shape[-1] != golden_case(case)["v"].shape[-1] for case in range(8)) >= 6


@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 63, 64, 65, 129, 200])
def test_chunk_matches_naive_across_a_cut(tokens: int) -> None:
    args, start = random_operands(tokens, 1, tokens, 2, 24, 20)
    want, want_state = naive.gated_delta(*args, state=start, l2_eps=EPS)
    cut = tokens // 2
    head, state = chunk.gated_delta(*[t[:, :cut] for t in args], state=start, l2_eps=EPS)
    tail, state = chunk.gated_delta(*[t[:, cut:] for t in args], state=state, l2_eps=EPS)
    assert relative_error(torch.cat([head, tail], 1), want) < TOLERANCE
    assert relative_error(state, want_state) < TOLERANCE


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 260), cuts=st.sets(st.integers(1, 4), max_size=4))
def test_cuts_at_multiples_of_64_are_bit_exact(seed: int, tokens: int, cuts: set[int]) -> None:
    args, start = random_operands(seed, 1, tokens, 2, 16, 24)
    want, want_state = chunk.gated_delta(*args, state=start, l2_eps=EPS)
    edges = sorted({0, tokens, *(64 * cut for cut in cuts if 64 * cut < tokens)})
    state, outs = start, []
    for begin, end in itertools.pairwise(edges):
        out, state = chunk.gated_delta(*[t[:, begin:end] for t in args], state=state, l2_eps=EPS)
        outs.append(out)
    assert torch.equal(torch.cat(outs, 1), want)
    assert torch.equal(state, want_state)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(2, 64), more=st.integers(1, 62))
def test_a_row_does_not_see_what_follows_it_in_the_tile(seed: int, tokens: int, more: int) -> None:
    args, start = random_operands(seed, 1, min(tokens + more, 64), 3, 16, 8)
    whole, _ = chunk.gated_delta(*args, state=start, l2_eps=EPS)
    head, _ = chunk.gated_delta(*[t[:, :tokens] for t in args], state=start, l2_eps=EPS)
    assert torch.equal(head, whole[:, :tokens])


@pytest.mark.usefixtures("keep_threads")
@pytest.mark.parametrize("tokens", [1, 40, 70])
@pytest.mark.parametrize("form", [chunk.gated_delta, recurrent.gated_delta], ids=["chunk", "recurrent"])
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 6),
    threads=st.integers(1, 4),
    shape=st.sampled_from([(4, 32, 32), (1, 16, 24), (3, 16, 40), (2, 64, 64), (1, 128, 128), (5, 20, 12)]),
)
def test_a_sequence_gives_the_same_bits_alone_and_beside_others(
    form: Delta, tokens: int, seed: int, batch: int, threads: int, shape: tuple[int, int, int]
) -> None:
    args, start = random_operands(seed, batch, tokens, *shape)
    torch.set_num_threads(threads)
    out, state = form(*args, state=start, l2_eps=EPS)
    torch.set_num_threads(1)
    for i in range(batch):
        alone, alone_state = form(*[t[i : i + 1] for t in args], state=start[i : i + 1], l2_eps=EPS)
        assert torch.equal(out[i], alone[0])
        assert torch.equal(state[i], alone_state[0])


@pytest.mark.parametrize("gates", ["spikes", "all_gone", "all_kept", "infinite", "tiny_after_huge"])
@each_form
def test_extreme_gates(form: Delta, gates: str) -> None:
    """No overflow, no NaN, and no digits lost to a neighbour's huge decay."""
    args, start = random_operands(7, 1, 100, 2, 16, 24, decay=0.05)
    g = args[3]
    if gates == "spikes":
        g[:, ::7] = -3000.0
    elif gates == "all_gone":
        g.fill_(-500.0)
    elif gates == "all_kept":
        g.fill_(0.0)
    elif gates == "infinite":
        g[:, 5::20] = float("-inf")
    else:
        g[:, 1] = -900.0
        g[:, 2:] = -1e-4
    out, state = form(*args, state=start, l2_eps=EPS)
    want, want_state = in_float64(args, start)
    assert relative_error(out, want) < TOLERANCE
    assert relative_error(state, want_state) < TOLERANCE


@each_form
def test_repeated_keys_without_decay_stay_stable(form: Delta) -> None:
    """The triangular system at its worst: every key alike, nothing forgotten, full correction."""
    args, start = random_operands(3, 1, 128, 1, 16, 8, decay=0.0)
    args[1][:] = args[1][:, :1]
    args[4].fill_(1.0)
    out, state = form(*args, state=start, l2_eps=EPS)
    want, want_state = in_float64(args, start)
    assert relative_error(out, want) < TOLERANCE
    assert relative_error(state, want_state) < TOLERANCE


def test_the_bound_multiplies_a_sigmoid_and_is_no_clamp() -> None:
    a_log = torch.tensor([0.5, -1.0])
    z = torch.linspace(-30.0, 30.0, 12).view(2, 2, 3)
    bounded = log_decay(z, a_log, -5.0)
    rate = a_log.double().exp()[:, None]
    torch.testing.assert_close(bounded.double(), -5.0 * torch.sigmoid(rate * z.double()), rtol=1e-6, atol=1e-12)
    unbounded = log_decay(z, a_log, None)
    wanted = -rate * torch.nn.functional.softplus(z.double())
    torch.testing.assert_close(unbounded.double(), wanted, rtol=1e-6, atol=1e-12)
    assert (bounded <= 0).all()
    assert (unbounded <= 0).all()
