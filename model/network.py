"""The network in eager torch, top to bottom: the backend that every other one must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from model.batch import PoolLayout, Segment
from model.checkpoint import Weights
from model.layers import Builder, KdaLayer, MlaLayer, Mlp, Moe, gated_unit
from model.ops.conv.shifted import short_conv
from model.ops.kda import chunk, recurrent
from model.ops.kda.gates import log_decay
from model.ops.linear.padded import linear, matmul, row_multiple
from model.ops.mla.paged import attend
from model.ops.moe.grouped import combine
from model.ops.moe.routing import route
from model.ops.norm import rms_norm
from model.ops.pointwise import sigmoid
from model.progress import LayerProgress
from model.residual import BlockResidual, PlainResidual, Residual
from moonrelay.errors import InvariantError


@dataclass(slots=True)
class Taps:
    """What a forward pass may be asked to keep, over all of its tokens.

    Shapes: after_layer and blocks hold [T, hidden] each (raw running sums, not mixes); the others are [kept, hidden].
    """

    after_layer: list[torch.Tensor] = field(default_factory=list)
    blocks: list[torch.Tensor] = field(default_factory=list)
    before_norm: torch.Tensor | None = None
    normed: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Share:
    """One segment's place in the batch: its rows of the token axis, its slot, its blocks."""

    rows: slice
    start: int
    slot: int
    blocks: torch.Tensor


class _Batch:
    """A ragged batch's tokens and pools. Token t of the batch writes row (`block[t]`, `offset[t]`)."""

    def __init__(
        self, segments: Sequence[Segment], rows: torch.Tensor, state: torch.Tensor, layout: PoolLayout
    ) -> None:
        heads, key, value = layout.num_heads, layout.key_dim, layout.value_dim
        shape = (layout.num_mla_layers, layout.block_tokens, layout.row_width)
        self.rows = rows[:, : layout.mla_floats].view(-1, *shape)
        split = layout.recurrent_floats
        self.recurrent = state[:, :split].view(-1, layout.num_kda_layers, heads, key, value)
        assert key == value, "the three convolutions share one history tensor"
        self.conv = state[:, split:].view(-1, layout.num_kda_layers, 3, layout.conv_history, heads * key)
        self.shares: list[_Share] = []
        block, offset, first = [], [], 0
        kept: list[int] = []
        for segment in segments:
            count = len(segment.ids)
            blocks = torch.tensor(list(segment.blocks), dtype=torch.int64)
            position = torch.arange(segment.start, segment.start + count)
            block.append(blocks[position // layout.block_tokens])
            offset.append(position % layout.block_tokens)
            wanted = segment.num_logits()
            kept.extend(range(first + count - wanted, first + count))
            self.shares.append(_Share(slice(first, first + count), segment.start, segment.slot, blocks))
            first += count
        self.block, self.offset = torch.cat(block), torch.cat(offset)
        self.kept = torch.tensor(kept, dtype=torch.int64)
        self.ids = torch.tensor([token for segment in segments for token in segment.ids], dtype=torch.int64)
        for share in self.shares:
            if share.start == 0:
                state[share.slot] = 0.0


class TorchBackend:
    """`model.batch.Backend` in eager torch, fp32. `invariant`: a row's bits depend on its own sequence alone."""

    name = "torch"

    def __init__(self, weights: Weights, *, threads: int, numerics: Literal["invariant", "fast"]) -> None:
        self._threads = threads
        self.draft_width = 0
        self.config = config = weights.config
        self._row_multiple = row_multiple(threads, invariant=numerics == "invariant")
        builder = Builder(weights, self._row_multiple)
        self.embedding = weights["model.embed_tokens.weight"]
        self.lm_head = weights["lm_head.weight"]
        self._layers = [builder.layer(index) for index in range(config.num_layers)]
        self._norm = builder.vector("model.norm.weight")
        self._output_mix = builder.mix("model.output_attn_res") if config.attn_res_block_size is not None else None
        self._head = builder.matrix("lm_head")
        self._glu = gated_unit(config)
        self._place = {
            layer: i for layers in (config.mla_layers, config.kda_layers) for i, layer in enumerate(layers)
        }

    def layout(self, block_tokens: int) -> PoolLayout:
        return replace(self.config.pool_layout(block_tokens), draft_width=self.draft_width)

    @torch.inference_mode()
    def forward(
        self,
        segments: Sequence[Segment],
        rows: torch.Tensor,
        state: torch.Tensor,
        *,
        progress: LayerProgress | None = None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """See `model.batch.Backend.forward`. `taps`, if given, is filled.

        Raises: InvariantError for a batch that would read or write outside the pools, or a slot twice.
        """
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # the row padding is made for this many
        layout = self.layout(rows.shape[1] // self.layout(1).block_floats)
        self._check(segments, rows, state, layout)
        batch = _Batch(segments, rows, state, layout)
        eps = self.config.rms_norm_eps
        residual = self._residual(self.embedding[batch.ids].float())
        for index, layer in enumerate(self._layers):
            x = rms_norm(residual.attention_input(index, layer), layer.input_norm, eps)
            if isinstance(layer.attention, KdaLayer):
                attended = self._kda(layer.attention, x, batch, self._place[index])
                if progress is not None:
                    progress.layer_done()
            else:
                attended = self._mla(layer.attention, x, batch, self._place[index])
            x = rms_norm(residual.ffn_input(layer, attended), layer.post_norm, eps)
            residual.end_layer(self._mlp(layer.ffn, x) if isinstance(layer.ffn, Mlp) else self._moe(layer.ffn, x))
            if taps is not None:
                taps.after_layer.append(residual.sum)
        mixed = residual.output(batch.kept)
        normed = rms_norm(mixed, self._norm, eps)
        if taps is not None:
            taps.blocks, taps.before_norm, taps.normed = residual.blocks, mixed, normed
        return linear(normed, self._head)

    def _check(
        self, segments: Sequence[Segment], rows: torch.Tensor, state: torch.Tensor, layout: PoolLayout
    ) -> None:
        slots = [segment.slot for segment in segments]
        if len(set(slots)) < len(slots) or not all(0 <= slot < len(state) for slot in slots):
            raise InvariantError(f"slots: expected distinct ones below {len(state)}, found {slots}")
        for segment in segments:
            room, end = len(segment.blocks) * layout.block_tokens, segment.start + len(segment.ids)
            if not segment.start < end <= room or segment.start < 0:
                raise InvariantError(f"segment [{segment.start}, {end}): expected 1 to {room} tokens of its blocks")
            if not all(0 <= block < len(rows) for block in segment.blocks):
                raise InvariantError(f"blocks: expected ones below {len(rows)}, found {list(segment.blocks)}")
            if not all(0 <= token < self.config.vocab_size for token in segment.ids):
                raise InvariantError(f"ids: expected ones below {self.config.vocab_size}")

    def _residual(self, embedded: torch.Tensor) -> Residual:
        if self.config.attn_res_block_size is None:
            return PlainResidual(embedded)
        assert self._output_mix is not None
        return BlockResidual(embedded, self.config.attn_res_block_size, self._output_mix, self.config.rms_norm_eps)

    def _kda(self, layer: KdaLayer, x: torch.Tensor, batch: _Batch, place: int) -> torch.Tensor:
        """x [T, hidden] to [T, hidden]; advances every slot's state and convolution history of KDA layer `place`."""
        config = self.config
        heads, dim = config.kda_heads, config.kda_head_dim
        *qkv, decay, beta, gate = linear(x, layer.inputs).split_with_sizes(layer.widths, -1)
        if layer.gate_out is not None:
            gate = linear(gate, layer.gate_out)
        z = linear(decay, layer.decay_out).view(-1, heads, dim) + layer.dt_bias
        g = log_decay(z, layer.a_log, config.gate_lower_bound)
        beta = sigmoid(beta)
        mixed = torch.empty(x.shape[0], heads, dim)
        # Steps of one token run together; longer segments one by one.
        single = [share for share in batch.shares if share.rows.stop - share.rows.start == 1]
        groups = [[share] for share in batch.shares if share.rows.stop - share.rows.start > 1]
        for group in [*groups, single] if single else groups:
            slots = torch.tensor([share.slot for share in group])
            take = torch.cat([torch.arange(share.rows.start, share.rows.stop) for share in group])
            split = (len(group), take.shape[0] // len(group), heads)
            convolved = []
            for i, raw in enumerate(qkv):
                x_i, history = raw[take].view(*split[:2], -1), batch.conv[slots, place, i]
                out, batch.conv[slots, place, i] = short_conv(x_i, layer.conv[i], history)
                convolved.append(out.view(*split, dim))
            operands = (*convolved, g[take].view(*split, dim), beta[take].view(split))
            states = batch.recurrent[slots, place]
            out, batch.recurrent[slots, place] = self._delta(operands, states, group[0].start)
            mixed[take] = out.view(-1, heads, dim)
        normed = rms_norm(mixed, layer.o_norm, config.rms_norm_eps)
        return linear(normed.view(x.shape[0], -1) * sigmoid(gate), layer.out)

    def _delta(
        self, operands: tuple[torch.Tensor, ...], states: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The delta rule in tiles on absolute positions: the first one ends at the next multiple of 64."""
        eps = self.config.qk_l2_eps
        tokens = operands[0].shape[1]
        if tokens == 1:
            return recurrent.gated_delta(*operands, state=states, l2_eps=eps)
        head = min(-start % chunk.TILE, tokens)
        outs = []
        for cut in (slice(0, head), slice(head, tokens)):
            if cut.start < cut.stop:
                out, states = chunk.gated_delta(*(t[:, cut] for t in operands), state=states, l2_eps=eps)
                outs.append(out)
        return torch.cat(outs, 1), states

    def _mla(self, layer: MlaLayer, x: torch.Tensor, batch: _Batch, place: int) -> torch.Tensor:
        """x [T, hidden] to [T, hidden]; appends the tokens' rows of MLA layer `place`."""
        config = self.config
        heads, rank = config.num_heads, config.kv_lora_rank
        query, row, *gate = linear(x, layer.inputs).split_with_sizes(layer.widths, -1)
        if layer.q_out is not None and layer.q_norm is not None:
            query = linear(rms_norm(query, layer.q_norm, config.lora_norm_eps), layer.q_out)
        latent = rms_norm(row[:, :rank], layer.row_norm, config.lora_norm_eps)
        pool = batch.rows[:, place]
        pool[batch.block, batch.offset] = torch.cat([latent, row[:, rank:]], -1)
        query = query.view(-1, heads, config.qk_nope_dim + config.qk_rope_dim)
        nope, shared = query.split_with_sizes((config.qk_nope_dim, config.qk_rope_dim), -1)
        folded = matmul(nope.transpose(0, 1), layer.key_up, self._row_multiple).transpose(0, 1)
        absorbed = torch.cat([folded, shared], -1)
        mixed = torch.cat(
            [
                attend(
                    absorbed[share.rows],
                    pool,
                    share.blocks,
                    start=share.start,
                    rank=rank,
                    scale=(config.qk_nope_dim + config.qk_rope_dim) ** -0.5,
                    row_multiple=self._row_multiple,
                )
                for share in batch.shares
            ]
        )
        out = matmul(mixed.transpose(0, 1), layer.value_up, self._row_multiple).transpose(0, 1)
        out = out.reshape(x.shape[0], -1)
        return linear(out * sigmoid(gate[0]) if gate else out, layer.out)

    def _mlp(self, layer: Mlp, x: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x, layer.gate_up).chunk(2, -1)
        return linear(self._glu(gate, up), layer.down)

    def _moe(self, layer: Moe, x: torch.Tensor) -> torch.Tensor:
        """Routed experts in the latent width, normed after they are summed, then the shared ones on top."""
        config = self.config
        chosen, weights = route(
            linear(x, layer.router),
            layer.bias,
            count=config.experts_per_token,
            renormalize=config.renormalize,
            scaling=config.routed_scaling_factor,
        )
        latent = x if layer.latent_down is None else linear(x, layer.latent_down)
        routed = combine(latent, chosen, weights, layer.gate_up, layer.down, self._glu)
        if layer.latent_up is not None and layer.norm is not None:
            routed = linear(rms_norm(routed, layer.norm, config.rms_norm_eps), layer.latent_up)
        return routed + self._mlp(layer.shared, x)
