"""What runs between layers: the plain sum, or K3's attention residuals. One object lives for one forward pass."""

from __future__ import annotations

import torch

from model.layers import Layer
from model.ops.attnres import mix


class PlainResidual:
    """Pre-norm residuals: h += attention(h); h += ffn(h).

    Shapes: everything [T, hidden].
    """

    def __init__(self, embedded: torch.Tensor) -> None:
        self.sum = embedded
        self.blocks: list[torch.Tensor] = []

    def attention_input(self, index: int, layer: Layer) -> torch.Tensor:
        return self.sum

    def ffn_input(self, layer: Layer, attended: torch.Tensor) -> torch.Tensor:
        self.sum = self.sum + attended
        return self.sum

    def end_layer(self, transformed: torch.Tensor) -> None:
        self.sum = self.sum + transformed

    def output(self, kept: torch.Tensor) -> torch.Tensor:
        """Before the final norm, for the token rows `kept` (int64)."""
        return self.sum[kept]


class BlockResidual:
    """Attention residuals: each sublayer reads a mix of the stored blocks and the running sum.

    A boundary layer stores its raw input, not the mix it reads, and the sum starts afresh from what it attended to.
    Source: the K3 technical report; checked against golden/.
    """

    def __init__(self, embedded: torch.Tensor, block_size: int, output_mix: torch.Tensor, eps: float) -> None:
        self.sum = embedded
        self.blocks: list[torch.Tensor] = []
        self._block_size, self._output_mix, self._eps = block_size, output_mix, eps
        self._starts_block = False

    def attention_input(self, index: int, layer: Layer) -> torch.Tensor:
        assert layer.attention_mix is not None
        read = mix([*self.blocks, self.sum], layer.attention_mix, self._eps) if self.blocks else self.sum
        self._starts_block = index % self._block_size == 0
        if self._starts_block:
            self.blocks.append(self.sum)
        return read

    def ffn_input(self, layer: Layer, attended: torch.Tensor) -> torch.Tensor:
        assert layer.ffn_mix is not None
        self.sum = attended if self._starts_block else self.sum + attended
        return mix([*self.blocks, self.sum], layer.ffn_mix, self._eps)

    def end_layer(self, transformed: torch.Tensor) -> None:
        self.sum = self.sum + transformed

    def output(self, kept: torch.Tensor) -> torch.Tensor:
        """Before the final norm, for the token rows `kept` (int64)."""
        return mix([source[kept] for source in (*self.blocks, self.sum)], self._output_mix, self._eps)


Residual = PlainResidual | BlockResidual
