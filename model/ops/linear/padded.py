"""y = x Wᵀ where a row's bits do not depend on how many rows there are, nor on the number of threads.

A BLAS picks its kernel by the product's shape, and kernels sum in different orders. Two paddings keep it on one:
rows to a multiple of 4 per thread (measured: otherwise M of 1 to 3 differ, more with more threads), columns of the
result to a multiple of 16 (measured: with three threads a thread's share narrower than that differs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

COLUMN_MULTIPLE = 16
ROWS_PER_THREAD = 4
INNER_MIN = 8  # below, torch multiplies the smallest batches by a loop of its own, the others by the BLAS


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight made ready for `linear`: fp32, its rows (the result's columns) padded with zeros.

    Shapes: data [out rounded up to 16, in]. `row_multiple` 1 gives the BLAS the rows as they are (fast numerics).
    """

    data: torch.Tensor
    out: int
    row_multiple: int


def row_multiple(threads: int, *, invariant: bool) -> int:
    """What rows are padded to; `threads` is the number that the BLAS will use."""
    return ROWS_PER_THREAD * threads if invariant else 1


def prepare(*weights: torch.Tensor, row_multiple: int) -> Matrix:
    """Stack weights [out_i, in] of any stored dtype into one matrix, so that one product serves them all."""
    out = sum(weight.shape[0] for weight in weights)
    data = torch.zeros(_round_up(out, COLUMN_MULTIPLE), weights[0].shape[1])
    torch.cat([weight.float() for weight in weights], out=data[:out])
    return Matrix(data, out, row_multiple)


def linear(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Multiply each row of x by the matrix.

    Shapes: x [..., in] fp32; result [..., out] fp32.
    """
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    product = _pad(flat, -2, matrix.row_multiple) @ matrix.data.t()
    return product[:rows, : matrix.out].reshape(*x.shape[:-1], matrix.out)


def matmul(a: torch.Tensor, b: torch.Tensor, row_multiple: int) -> torch.Tensor:
    """a b for operands that are both activations, or for one weight per head.

    Shapes: a [..., M, K]; b [..., K, N]; result [..., M, N], all fp32.
    """
    rows, columns = a.shape[-2], b.shape[-1]
    if a.shape[-1] < INNER_MIN:
        a, b = _pad(a, -1, INNER_MIN), _pad(b, -2, INNER_MIN)
    product = _pad(a, -2, row_multiple) @ _pad(b, -1, COLUMN_MULTIPLE)
    return product[..., :rows, :columns]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pad(x: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    missing = -x.shape[dim] % multiple
    if missing == 0:
        return x
    return F.pad(x, (0, missing) if dim == -1 else (0, 0, 0, missing))
