"""The C++ operations one by one: right, and the same bits however the work is split."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from ctypes import c_int32

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.native.backend import library
from model.native.ffi import Finish, Join, Kind, MathFunction, Source
from tests.golden import golden_dir, golden_tensors, relative_error

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="there is no C++ compiler"
)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
sizes = st.tuples(st.integers(1, 40), st.integers(1, 90), st.integers(1, 200), st.integers(0, 2**32 - 1))


class Stored:
    """One [n, k] weight as stored, and its exact fp32 values."""

    def __init__(self, kind: Kind, n: int, k: int, rng: np.random.Generator) -> None:
        self.kind, self.n, self.k = kind, n, k
        self.scale = rng.integers(100, 140, (n, max(1, k // 32))).astype(np.uint8)
        if kind is Kind.MX:
            codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
            self.data = np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4)
            self.values = E2M1[codes] * np.exp2(np.repeat(self.scale, 32, 1).astype(np.float32) - 127)
        else:
            bits = rng.standard_normal((n, k)).astype(np.float32).view(np.uint32)
            bits = bits & 0xFFFF0000 if kind is Kind.BF16 else bits
            self.values = bits.view(np.float32)
            self.data = (bits >> 16).astype(np.uint16) if kind is Kind.BF16 else self.values

    @property
    def source(self) -> Source:
        return Source(self.data.ctypes.data, self.scale.ctypes.data, self.kind, self.n, self.k, self.k, 1)

    def widened(self) -> Stored:
        """The same values as bf16 (an MX value fits exactly)."""
        other = Stored.__new__(Stored)
        other.kind, other.n, other.k, other.scale, other.values = Kind.BF16, self.n, self.k, self.scale, self.values
        other.data = (self.values.view(np.uint32) >> 16).astype(np.uint16)
        assert np.array_equal((other.data.astype(np.uint32) << 16).view(np.float32), self.values)
        return other


def product(
    parts: Sequence[Stored],
    a: np.ndarray,
    n: int,
    *,
    join: Join = Join.ROWS,
    finish: Finish = Finish.STORE,
    d: np.ndarray | None = None,
    betas: Sequence[float] | None = None,
    threads: int = 1,
) -> np.ndarray:
    """[m, n], computed into a wider buffer whose spare columns must stay as they were."""
    lib, spare = library(), 3
    out = np.full((len(a), n + spare), 12345.0, np.float32)
    sources = (Source * len(parts))(*(part.source for part in parts))
    a = np.ascontiguousarray(a, np.float32)
    act = None if betas is None else np.array(betas, np.float32)
    status = lib.mr_op_gemm(
        sources, len(parts), join, a.ctypes.data, len(a), out.ctypes.data, n + spare, finish,
        None if d is None else d.ctypes.data, n, None if act is None else act.ctypes.data, threads,
    )  # fmt: skip
    assert status == 0, lib.mr_error()
    assert (out[:, n:] == 12345.0).all()
    return out[:, :n]


def weight(kind: Kind, n: int, k: int, seed: int) -> tuple[Stored, np.random.Generator]:
    rng = np.random.default_rng(seed)
    return Stored(kind, n, -(-k // 32) * 32 if kind is Kind.MX else k, rng), rng


def close(found: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    """Within the error of an fp32 sum whose terms' magnitudes add up to `bound`."""
    assert np.isfinite(found).all()
    assert (np.abs(found - expected) <= 1e-5 * bound + 1e-30).all()


@pytest.mark.parametrize("kind", list(Kind))
@given(sizes)
@settings(max_examples=25, deadline=None)
def test_products_are_right_and_rows_do_not_depend_on_the_batch(kind: Kind, size: tuple[int, int, int, int]) -> None:
    m, n, k, seed = size
    w, rng = weight(kind, n, k, seed)
    a = rng.standard_normal((m, w.k)).astype(np.float32)
    whole = product([w], a, n)
    close(whole, a.astype(np.float64) @ w.values.T.astype(np.float64), np.abs(a) @ np.abs(w.values.T))
    cut = int(rng.integers(0, m + 1))
    pieces = [product([w], part, n, threads=2) for part in (a[:cut], a[cut:]) if len(part)]
    assert np.array_equal(np.concatenate(pieces), whole)
    row = int(rng.integers(0, m))
    assert np.array_equal(product([w], a[row : row + 1], n)[0], whole[row])


@given(sizes)
@settings(max_examples=25, deadline=None)
def test_mx_weights_give_the_bits_of_their_exact_bf16_values(size: tuple[int, int, int, int]) -> None:
    m, n, k, seed = size
    w, rng = weight(Kind.MX, n, k, seed)
    a = rng.standard_normal((m, w.k)).astype(np.float32)
    assert np.array_equal(product([w], a, n), product([w.widened()], a, n))


def test_large_products_are_shared_out_without_a_trace() -> None:
    rng = np.random.default_rng(1)
    for kind in Kind:
        w = Stored(kind, 500, 320, rng)
        a = rng.standard_normal((301, 320)).astype(np.float32)
        whole = product([w], a, 500)
        close(whole, a.astype(np.float64) @ w.values.T.astype(np.float64), np.abs(a) @ np.abs(w.values.T))
        assert np.array_equal(product([w], a, 500, threads=2), whole)
        assert np.array_equal(product([w], a, 500, threads=3), whole)


@given(sizes, st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_joined_parts_multiply_like_one_matrix(size: tuple[int, int, int, int], more: int) -> None:
    m, n, k, seed = size
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((m, k + more)).astype(np.float32)
    first, second = Stored(Kind.BF16, n, k, rng), Stored(Kind.F32, more, k, rng)  # joined kinds are widened
    below = np.concatenate([product([first], a[:, :k], n), product([second], a[:, :k], more)], 1)
    assert np.array_equal(product([first, second], a[:, :k], n + more), below)
    beside = Stored(Kind.BF16, n, more, rng)
    both = np.concatenate([first.values, beside.values], 1)
    found = product([first, beside], a, n, join=Join.COLUMNS)
    close(found, a.astype(np.float64) @ both.T.astype(np.float64), np.abs(a) @ np.abs(both.T))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("kind", list(Kind))
@given(sizes)
@settings(max_examples=15, deadline=None)
def test_what_follows_a_product(kind: Kind, size: tuple[int, int, int, int]) -> None:
    m, n, k, seed = size
    w, rng = weight(kind, n, k, seed)
    a = (rng.standard_normal((m, w.k)) / np.abs(w.values).max() / 4).astype(np.float32)
    d = rng.standard_normal((m, n)).astype(np.float32)
    plain = product([w], a, n).astype(np.float64)
    assert np.array_equal(product([w], a, n, finish=Finish.ADD, d=d), d + plain.astype(np.float32))
    gate = product([w], a, n, finish=Finish.GATE, d=d)
    np.testing.assert_allclose(gate, plain * sigmoid(d.astype(np.float64)), rtol=2e-6, atol=1e-30)
    up_weight = Stored(kind, n, w.k, rng)
    up = product([up_weight], a, n).astype(np.float64)
    situ = 4 * np.tanh(plain / 4) * sigmoid(plain) * 25 * np.tanh(up / 25)
    found = product([w, up_weight], a, n, join=Join.GLU, finish=Finish.GLU, betas=(4, 25))
    np.testing.assert_allclose(found, situ, rtol=4e-6, atol=1e-30)
    found = product([w, up_weight], a, n, join=Join.GLU, finish=Finish.GLU, betas=(0, 0))
    np.testing.assert_allclose(found, plain * sigmoid(plain) * up, rtol=4e-6, atol=1e-30)


def test_mx_values_equal_the_golden_table() -> None:
    """Every code at every exponent; those the fast decoder cannot express are widened at load."""
    from safetensors.torch import load_file

    table = load_file(golden_dir("k3_tiny_mxfp4") / "table.safetensors")
    packed, scale, expected = table["packed"], table["scale"], table["value_f32"]
    for rows in (slice(0, None), slice(1, -1)):  # with and without the extreme exponents
        bytes_, exponents = packed[rows].numpy().copy(), scale[rows].numpy().copy()
        n, k = len(bytes_), 2 * bytes_.shape[1]
        out, kind = np.empty((n, k), np.float32), c_int32()
        source = Source(bytes_.ctypes.data, exponents.ctypes.data, Kind.MX, n, k, k, 1)
        assert library().mr_op_unpack(ctypes.byref(source), 1, Join.ROWS, out.ctypes.data, ctypes.byref(kind)) == 0
        assert np.array_equal(out, expected[rows].numpy())
        has_extremes = bool(np.isin(exponents, (0, 255)).any())
        assert Kind(kind.value) is (Kind.BF16 if has_extremes else Kind.MX)


def apply(function: MathFunction, x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty_like(x)
    library().mr_op_math(function, x.ctypes.data, out.ctypes.data, x.size)
    return out


EXACT = {
    MathFunction.EXP: np.exp,
    MathFunction.SIGMOID: sigmoid,
    MathFunction.TANH: np.tanh,
    MathFunction.SOFTPLUS: lambda x: np.logaddexp(x, 0),
}


@pytest.mark.parametrize("function", list(MathFunction))
def test_functions_are_accurate_to_a_few_units_in_the_last_place(function: MathFunction) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.uniform(-86, 88, 200_000), rng.standard_normal(200_000), rng.standard_normal(9999) * 1e-4]
    )
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        expected = EXACT[function](x.astype(np.float64))
    units = np.abs(apply(function, x) - expected) / np.spacing(np.abs(expected).astype(np.float32))
    assert units.max() < 3.5


def test_functions_at_the_edges() -> None:
    inf, nan = np.inf, np.nan
    assert apply(MathFunction.EXP, [0, -inf, inf, -100, 88.7]).tolist()[:4] == [1, 0, inf, 0]
    assert np.isfinite(apply(MathFunction.EXP, [88.7])).all()
    assert apply(MathFunction.SIGMOID, [0, -inf, inf, 200]).tolist() == [0.5, 0, 1, 1]
    assert apply(MathFunction.TANH, [0, -inf, inf, 20]).tolist() == [0, -1, 1, 1]
    assert apply(MathFunction.SOFTPLUS, [-inf, inf, 100]).tolist() == [0, inf, 100]
    for function in MathFunction:
        assert np.isnan(apply(function, [nan])).all(), function


def kda(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, v: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """All heads of one case, raw q and k; advances `state` [H,K,V] in place and returns o [T,H,V]."""
    (tokens, heads, keys), values = q.shape, v.shape[-1]
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * keys**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    out = torch.empty(heads, tokens, values)
    for head in range(heads):
        inputs = [x[:, head].contiguous() for x in (q, k, g, beta, v)]
        pointers = [x.data_ptr() for x in (*inputs, state[head], out[head])]
        assert library().mr_op_kda(tokens, keys, values, *pointers) == 0
    return out.transpose(0, 1)


@pytest.mark.parametrize("case", range(8))
def test_kda_equals_the_golden_operator_at_any_cut(case: int) -> None:
    golden = {n.split(".", 1)[1]: t for n, t in golden_tensors("kda_op").items() if n.startswith(f"case{case}.")}
    inputs = [golden[name] for name in ("q", "k", "g", "beta", "v")]
    tokens, heads, keys = golden["q"].shape
    begin = golden.get("initial_state", torch.zeros(heads, keys, golden["v"].shape[-1]))
    state = begin.clone()
    out = kda(*inputs, state)
    assert relative_error(out, golden["o"]) < 5e-6
    assert relative_error(state, golden["final_state"]) < 5e-6
    stops = sorted(
        {1, tokens // 3, *(int(n.removeprefix("state_after_")) for n in golden if "state_after" in n), tokens}
    )
    piecewise, at = begin.clone(), 0
    for stop in stops:
        if stop == at:
            continue
        assert torch.equal(kda(*(x[at:stop] for x in inputs), piecewise), out[at:stop])
        at = stop
        if f"state_after_{stop}" in golden:
            assert relative_error(piecewise, golden[f"state_after_{stop}"]) < 5e-6
    assert torch.equal(piecewise, state)
