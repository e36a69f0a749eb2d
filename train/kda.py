"""The gated delta rule with autograd, in tiles of 32 tokens: the operation training spends its care on.

Notation of one tile: G_i is the running sum of log-decays, m the tile's middle. exp(G_i - G_j) is split as
exp(G_i - G_m) * exp(G_m - G_j): with the gate bounded by -5 both exponents stay within 80, inside fp32. Everything
between tiles is kept relative to the middle (R = exp(G_m) * S), so that a tile needs three decayed copies of q and k
and two decay vectors, and the scan over tiles is two small batched GEMMs a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TILE = 32  # twice what the bound allows from one end: both halves stay within 16 * 5 = 80 < 88


def naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Run the rule token by token; the slow twin of `tiled`.

    Shapes: q k g [B,T,H,K]; v, out [B,T,H,V]; beta [B,T,H]. q is normalised and scaled, k normalised.
    Units:  g is log-decay in (-5, 0]; beta in [0, 1].
    """
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


def tiled(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The same rule and shapes as `naive`; T must be a multiple of TILE."""
    batch, length, heads, _ = q.shape
    tiles, value_width = length // TILE, v.shape[3]

    def by_tile(x: Tensor) -> Tensor:  # [B,T,H,D] -> [tiles, B*H, TILE, D]
        x = x.view(batch, tiles, TILE, heads, -1).permute(1, 0, 3, 2, 4)
        return x.reshape(tiles, batch * heads, TILE, x.shape[-1])

    lower = torch.ones(TILE, TILE, dtype=q.dtype).tril()
    total = lower @ by_tile(g)  # G; a GEMM, since a scan along a strided axis is slower
    middle, last = total[:, :, TILE // 2 - 1 : TILE // 2], total[:, :, -1:]
    rise, fall = (total - middle).exp(), (middle - total).exp()
    q_rise, keys, betas = by_tile(q) * rise, by_tile(k), by_tile(beta[..., None])
    k_rise, k_fall = keys * rise * betas, keys * fall
    rows = k_rise @ k_fall.mT
    scores = (q_rise @ k_fall.mT).masked_fill(lower == 0, 0.0)
    solve = unit_lower_inverse(rows.masked_fill(lower.mT == 1, 0.0))
    erase, write = solve @ k_rise, solve @ (by_tile(v) * betas)
    enter, leave = middle.mT.exp(), (last - middle).mT.exp()
    values, states = scan(erase, write, k_fall, leave, enter)
    out = q_rise @ states + scores @ values
    out = out.view(tiles, batch, heads, TILE, value_width).permute(1, 0, 3, 2, 4)
    result: Tensor = out.reshape(batch, length, heads, value_width)
    return result


@torch.library.custom_op("moonrelay::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(strictly_lower: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower A [..., C, C]."""
    eye = torch.eye(strictly_lower.shape[-1], dtype=strictly_lower.dtype)
    inverse: Tensor = torch.linalg.solve_triangular(strictly_lower + eye, eye, upper=False, unitriangular=True)
    return inverse.contiguous()


@unit_lower_inverse.register_fake
def _(strictly_lower: Tensor) -> Tensor:
    return torch.empty_like(strictly_lower, memory_format=torch.contiguous_format)


def _inverse_setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_backward(ctx: Any, grad: Tensor) -> Tensor:
    inverse: Tensor = ctx.saved_tensors[0]
    return -(inverse.mT @ grad @ inverse.mT)


unit_lower_inverse.register_autograd(_inverse_backward, setup_context=_inverse_setup)


@torch.library.custom_op("moonrelay::kda_scan", mutates_args=())
def scan(erase: Tensor, write: Tensor, keys: Tensor, leave: Tensor, enter: Tensor) -> tuple[Tensor, Tensor]:
    """Values v_n = write_n - erase_n R_n, and the states R_n that each tile starts from.

    R_{n+1} = enter_{n+1} * (leave_n * (R_n + keys_n^T v_n)).

    The two decays are applied one after the other: their product can underflow where the result does not.
    Shapes: erase keys [N,P,C,K]; write, values [N,P,C,V]; leave enter [N,P,K,1]; states [N,P,K,V], states[0] zero.
    """
    tiles, parallel, _, width = erase.shape
    values = torch.empty_like(write)
    states = write.new_empty(tiles, parallel, width, write.shape[-1])
    states[0] = 0.0
    for n in range(tiles):
        torch.baddbmm(write[n], erase[n], states[n], alpha=-1, out=values[n])
        if n + 1 < tiles:
            torch.baddbmm(states[n], keys[n].mT, values[n], out=states[n + 1])
            states[n + 1].mul_(leave[n]).mul_(enter[n + 1])
    return values, states


@scan.register_fake
def _(erase: Tensor, write: Tensor, keys: Tensor, leave: Tensor, enter: Tensor) -> tuple[Tensor, Tensor]:
    tiles, parallel, _, width = erase.shape
    return torch.empty_like(write), write.new_empty(tiles, parallel, width, write.shape[-1])


@torch.library.custom_op("moonrelay::kda_scan_backward", mutates_args=())
def scan_backward(
    grad_values: Tensor,
    grad_states: Tensor,
    erase: Tensor,
    keys: Tensor,
    leave: Tensor,
    enter: Tensor,
    values: Tensor,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of erase, write, keys, leave, enter."""
    tiles = erase.shape[0]
    into = torch.zeros_like(states)  # gradient at R_n + keys_n^T v_n
    grad_write = torch.empty_like(values)
    grad_leave, grad_enter = torch.zeros_like(leave), torch.zeros_like(enter)
    grad_next = torch.zeros_like(states[0])
    for n in range(tiles - 1, -1, -1):
        if n + 1 < tiles:
            held = torch.baddbmm(states[n], keys[n].mT, values[n])
            at_end = grad_next * enter[n + 1]
            torch.mul(at_end, leave[n], out=into[n])
            torch.sum(at_end.mul_(held), -1, keepdim=True, out=grad_leave[n])
            torch.sum(held.mul_(leave[n]).mul_(grad_next), -1, keepdim=True, out=grad_enter[n + 1])
        torch.baddbmm(grad_values[n], keys[n], into[n], out=grad_write[n])
        grad_next = torch.baddbmm(grad_states[n].add(into[n]), erase[n].mT, grad_write[n], alpha=-1)
    return -(grad_write @ states.mT), grad_write, values @ into.mT, grad_leave, grad_enter


@scan_backward.register_fake
def _(
    grad_values: Tensor,
    grad_states: Tensor,
    erase: Tensor,
    keys: Tensor,
    leave: Tensor,
    enter: Tensor,
    values: Tensor,
    states: Tensor,
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (erase, values, keys, leave, enter))


def _scan_setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    erase, _, keys, leave, enter = inputs
    ctx.save_for_backward(erase, keys, leave, enter, *output)


def _scan_backward(ctx: Any, grad_values: Tensor, grad_states: Tensor) -> tuple[Tensor, ...]:
    grads: tuple[Tensor, ...] = scan_backward(grad_values.contiguous(), grad_states.contiguous(), *ctx.saved_tensors)
    return grads


scan.register_autograd(_scan_backward, setup_context=_scan_setup)
