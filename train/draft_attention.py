"""Attention of many short blocks to the rows before their anchors and to themselves, a sequence at a time.

The scores of one sequence fit a core's cache, those of a batch do not, and most of the time went to moving them; so
softmax and its derivative are written out, over the two kinds of keys at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, places: Tensor
    ) -> Tensor:
        sequences, heads, anchors, slots, _ = query.shape
        out = query.new_empty(*query.shape[:-1], values.shape[-1])
        kept: list[Tensor] = []
        seen = places.amax(1).tolist()
        for n in range(sequences):
            unseen = (torch.arange(seen[n]) >= places[n, :, None])[:, None]
            far = (query[n].flatten(1, 2) @ keys[n, :, : seen[n]].mT).float().view(heads, anchors, slots, -1)
            near = (query[n] @ own_keys[n].mT).float()
            far.masked_fill_(unseen, -torch.inf)
            most = near.amax(-1, keepdim=True)
            if seen[n]:
                most = torch.maximum(most, far.amax(-1, keepdim=True))
            far.sub_(most).exp_()
            near.sub_(most).exp_()
            total = far.sum(-1, keepdim=True) + near.sum(-1, keepdim=True)
            far, near = far.div_(total).to(query.dtype), near.div_(total).to(query.dtype)
            mixed = far.flatten(1, 2) @ values[n, :, : seen[n]]
            torch.add(mixed.view_as(out[n]), near @ own_values[n], out=out[n])
            kept += [far, near]
        ctx.save_for_backward(query, keys, values, own_keys, own_values, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, own_keys, own_values, out, *kept = ctx.saved_tensors
        grads = [torch.zeros_like(part) for part in (query, keys, values, own_keys, own_values)]
        of_query, of_keys, of_values, of_own_keys, of_own_values = grads
        grad = grad.to(query.dtype)
        for n in range(len(query)):
            far, near = kept[2 * n : 2 * n + 2]
            seen = far.shape[-1]
            flat, asked = grad[n].flatten(1, 2), query[n].flatten(1, 2)
            mean = (grad[n].float() * out[n].float()).sum(-1, keepdim=True)
            of_values[n, :, :seen] = far.flatten(1, 2).mT @ flat
            of_own_values[n] = near.mT @ grad[n]
            by_far = (flat @ values[n, :, :seen].mT).float().view_as(far).sub_(mean).mul_(far).to(query.dtype)
            by_near = (grad[n] @ own_values[n].mT).float().sub_(mean).mul_(near).to(query.dtype)
            from_far = by_far.flatten(1, 2) @ keys[n, :, :seen]
            torch.add(from_far.view_as(query[n]), by_near @ own_keys[n], out=of_query[n])
            of_keys[n, :, :seen] = by_far.flatten(1, 2).mT @ asked
            of_own_keys[n] = by_near.mT @ query[n]
        return *grads, None


def attend(
    query: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, places: Tensor
) -> Tensor:
    """What every slot of every block gathers: [sequences, heads, anchors, slots, v_dim].

    Shapes: query, own_keys [sequences, heads, anchors, slots, dim], the query scaled already; keys [sequences, heads,
    tokens, dim]; values, own_values the same with v_dim; places [sequences, anchors]: how many rows a block sees.
    """
    return _Attend.apply(query, keys, values, own_keys, own_values, places)  # type: ignore[no-any-return, no-untyped-call]
