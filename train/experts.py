"""Routed experts for training: MXFP4 rounding of the weights and one GEMM per expert over its own tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GROUP = 32
LARGEST = 6.0  # of E2M1
SCALE_MIN = 64  # biased exponent floor, 2^-63: keeps a group of zeros finite
CODE_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_parts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(signed E2M1 values [..., groups, 32], biased exponents [..., groups, 1] int32) of `weight` [..., in].

    The exponent is the least for which nothing in the group exceeds 6; values round to nearest, ties to even code.
    """
    groups = weight.reshape(*weight.shape[:-1], -1, GROUP)
    bits = (groups.abs().amax(-1, keepdim=True) / LARGEST).view(torch.int32)
    exponent = ((bits + 0x7F_FFFF) >> 23).clamp_(min=SCALE_MIN)
    scaled = groups / (exponent << 23).view(torch.float32)
    size = scaled.abs()
    rounded = torch.where(
        size < 2.0, (size * 2).round() / 2, torch.where(size < 4.0, size.round(), (size / 2).round() * 2)
    )
    return rounded.clamp_(max=LARGEST).copysign(scaled), exponent


def mxfp4_round(weight: Tensor) -> Tensor:
    """`weight` as the shipped checkpoint will hold it."""
    values, exponent = mxfp4_parts(weight)
    return (values * (exponent << 23).view(torch.float32)).flatten(-2)


def mxfp4_pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(weight_packed uint8 [..., in/2], weight_scale uint8 [..., in/32]); the even index is the low nibble."""
    values, exponent = mxfp4_parts(weight)
    table = torch.tensor(CODE_VALUES)
    codes = torch.searchsorted(table, values.abs().contiguous()) | (values.signbit().long() << 3)
    codes = codes.flatten(-2)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.to(torch.uint8), exponent[..., 0].to(torch.uint8)


@torch.library.custom_op("moonrelay::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """rows [M,in], sorted by expert, times weight[e] [out,in] transposed for the counts[e] rows of expert e."""
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    start = 0
    for expert, count in enumerate(counts.tolist()):
        end = start + count
        torch.mm(rows[start:end], weight[expert].mT, out=out[start:end])
        start = end
    return out


@grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op("moonrelay::grouped_mm_backward", mutates_args=())
def grouped_mm_backward(grad: Tensor, rows: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weight."""
    grad_rows, grad_weight = torch.empty_like(rows), torch.zeros_like(weight)
    start = 0
    for expert, count in enumerate(counts.tolist()):
        end = start + count
        torch.mm(grad[start:end], weight[expert], out=grad_rows[start:end])
        torch.mm(grad[start:end].mT, rows[start:end], out=grad_weight[expert])
        start = end
    return grad_rows, grad_weight


@grouped_mm_backward.register_fake
def _(grad: Tensor, rows: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight)


def _mm_setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *grouped_mm_backward(grad.contiguous(), *ctx.saved_tensors), None


grouped_mm.register_autograd(_mm_backward, setup_context=_mm_setup)


@torch.library.custom_op("moonrelay::permute_rows", mutates_args=())
def permute_rows(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows[order]; `inverse` undoes it, so that the backward pass is a gather too."""
    return rows.index_select(0, order)


@permute_rows.register_fake
def _(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return rows.new_empty(order.shape[0], rows.shape[1])


def _permute_setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _permute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    order, inverse = ctx.saved_tensors
    return permute_rows(grad.contiguous(), inverse, order), None, None


permute_rows.register_autograd(_permute_backward, setup_context=_permute_setup)
