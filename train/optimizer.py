"""Muon for matrices, Adam for everything else.

Muon (Newton-Schulz orthogonalised momentum) needs far fewer steps than Adam; matrices of one shape are
orthogonalised together, so that a layer's sixteen experts cost one batched GEMM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Five odd quintics that take singular values in [0.001, 1] to 1 within a few percent (arXiv 2505.16932).
QUINTICS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MUON_LR = 0.015
MUON_MOMENTUM = 0.95
WEIGHT_DECAY = 0.0005  # a step, at full rate
ADAM_BETAS = (0.85, 0.97)
ADAM_LR = {
    "model.embed_tokens.weight": 0.02,
    "lm_head.weight": 0.004,
    "markov_head.markov_w1.weight": 0.004,
    "markov_head.markov_w2.weight": 0.004,
}
ADAM_LR_OTHER = 0.008


def orthogonalise(stack: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The nearest matrices with singular values near 1, of a stack [n, out, in]. `dtype`: of the products."""
    wide = stack.shape[1] <= stack.shape[2]
    x = stack if wide else stack.mT
    x = (x / (x.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-6)).to(dtype)
    for a, b, c in QUINTICS:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(stack.dtype)


def is_matrix(name: str, value: Tensor) -> bool:
    """Whether Muon trains it: a matrix (or a stack of experts) that is neither a table nor a single row."""
    if name in ADAM_LR or "_conv1d" in name or value.dim() < 2:
        return False
    return value.shape[-2] > 1


class Optimizer:
    """Updates `params` in place; frozen ones (the router's balancing bias) are the caller's.

    `dtype`: of Muon's products, whose result need not be exact.
    """

    def __init__(self, params: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._params = {name: value for name, value in params.items() if value.requires_grad}
        self._groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, value in self._params.items():
            if is_matrix(name, value):
                self._groups[tuple(value.shape[-2:])].append(name)
        self._adam = [name for name, value in self._params.items() if not is_matrix(name, value)]
        self.first = {name: torch.zeros_like(value) for name, value in self._params.items()}
        self.second = {name: torch.zeros_like(self._params[name]) for name in self._adam}
        self.steps = 0

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], rate: float) -> None:
        """One update with the learning rates scaled by `rate`."""
        self.steps += 1
        for shape, names in self._groups.items():
            self._muon(shape, names, grads, rate)
        for name in self._adam:
            self._adam_step(name, grads[name], rate)

    def _muon(self, shape: tuple[int, ...], names: list[str], grads: Mapping[str, Tensor], rate: float) -> None:
        momentum = min(MUON_MOMENTUM, 0.85 + 0.1 * self.steps / 100)
        directions = []
        for name in names:
            self.first[name].lerp_(grads[name], 1 - momentum)
            directions.append(grads[name].lerp(self.first[name], momentum).view(-1, *shape))
        update = orthogonalise(torch.cat(directions), self._dtype)
        lr = MUON_LR * rate * max(1.0, shape[0] / shape[1]) ** 0.5
        for name, part in zip(names, torch.split(update, [len(d) for d in directions]), strict=True):
            value = self._params[name]
            value.mul_(1 - WEIGHT_DECAY * rate).add_(part.reshape(value.shape), alpha=-lr)

    def _adam_step(self, name: str, grad: Tensor, rate: float) -> None:
        beta1, beta2 = ADAM_BETAS
        first, second = self.first[name], self.second[name]
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (second / (1 - beta2**self.steps)).sqrt_().add_(1e-10)
        lr = ADAM_LR.get(name, ADAM_LR_OTHER) * rate / (1 - beta1**self.steps)
        self._params[name].addcdiv_(first, root, value=-lr)

    def state(self) -> dict[str, Any]:
        return {"first": self.first, "second": self.second, "steps": self.steps}

    def load(self, state: Mapping[str, Any]) -> None:
        for mine, theirs in ((self.first, state["first"]), (self.second, state["second"])):
            for name, value in theirs.items():
                mine[name].copy_(value)
        self.steps = state["steps"]
