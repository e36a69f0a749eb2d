"""The torch drafter behind `model.drafting.DraftModel`: rows in the blocks of the pool, requests of any length."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.batch import PoolLayout, Segment
from model.drafter.network import Draft, Drafter
from model.drafting import NOTHING, DraftRequest, Proposal
from moonrelay.errors import InvariantError


class TorchDraftModel:
    """The twin that `model.native.drafter` must agree with. `layout`: one token's share of the target's pools."""

    def __init__(self, drafter: Drafter, drafter_id: str, layout: PoolLayout) -> None:
        config = drafter.config
        self.drafter_id = drafter_id
        self.target_layers = config.target_layers
        self.block_len = config.block_len
        self.draft_width = config.layers * config.row_width
        self._drafter = drafter
        self._mla_width = layout.mla_floats // layout.block_tokens

    def write_rows(self, segments: Sequence[Segment], taps: torch.Tensor, rows: torch.Tensor) -> None:
        """See `DraftModel.write_rows`."""
        pool, block_tokens = self._pool(rows)
        if len(taps) != sum(len(segment.ids) for segment in segments):
            raise InvariantError(f"expected the taps of every token, found {len(taps)}")
        shares = torch.split(taps, [len(segment.ids) for segment in segments])
        for segment, share in zip(segments, shares, strict=True):
            position = torch.arange(segment.start, segment.start + len(segment.ids))
            block = torch.tensor(segment.blocks)[position // block_tokens]
            made = self._drafter.context_rows(share, segment.start)
            pool[block, :, position % block_tokens] = made.transpose(0, 1)

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest], rows: torch.Tensor) -> list[Proposal]:
        """See `DraftModel.draft`."""
        pool, block_tokens = self._pool(rows)
        for request in requests:
            self._check(request, len(rows), block_tokens)
        return [self._propose(request, pool, block_tokens) for request in requests]

    def _pool(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """[blocks, draft layers, tokens, row_width] of the drafter's part, and the tokens of a block."""
        block_tokens, rest = divmod(rows.shape[1], self._mla_width + self.draft_width)
        if rest or block_tokens < 1:
            raise InvariantError(f"rows: {rows.shape[1]} floats a block do not fit this drafter")
        config = self._drafter.config
        shape = (len(rows), config.layers, block_tokens, config.row_width)
        return rows[:, block_tokens * self._mla_width :].view(shape), block_tokens

    def _check(self, request: DraftRequest, num_blocks: int, block_tokens: int) -> None:
        used = request.blocks[: -(-request.position // block_tokens)]
        if not 0 <= request.first <= request.position <= len(used) * block_tokens:
            raise InvariantError(
                f"rows [{request.first}, {request.position}) are not in {len(request.blocks)} blocks"
            )
        if not all(0 <= block < num_blocks for block in used):
            raise InvariantError(f"blocks: expected ones below {num_blocks}, found {list(used)}")
        if not 0 <= request.anchor < self._drafter.config.vocab:
            raise InvariantError(f"anchor {request.anchor} is outside the vocabulary")
        if not 1 <= request.length <= self.block_len:
            raise InvariantError(f"expected a draft of 1 to {self.block_len} tokens, not {request.length}")
        if not len(request.guess) == len(request.more) <= request.length:
            raise InvariantError(f"a guess of {len(request.guess)} tokens for a draft of {request.length}")
        if not all(0 <= token < self._drafter.config.vocab for token in request.guess):
            raise InvariantError(f"a guess outside the vocabulary: {list(request.guess)}")
        if request.temperature > 0 and len(request.uniforms) != request.length:
            raise InvariantError(f"expected {request.length} uniform numbers, found {len(request.uniforms)}")

    def _propose(self, request: DraftRequest, pool: torch.Tensor, block_tokens: int) -> Proposal:
        begin = request.first // block_tokens
        blocks = torch.tensor(request.blocks[begin : -(-request.position // block_tokens)], dtype=torch.int64)
        context = pool[blocks].transpose(0, 1).flatten(1, 2)
        context = context[:, request.first - begin * block_tokens : request.position - begin * block_tokens]
        laws: list[torch.Tensor] = []
        guess = list(request.guess)  # while the draft says the same

        def choose(slot: int, logits: torch.Tensor) -> int:
            if slot < len(guess):
                logits[guess[slot]] += request.more[slot] * (request.temperature or 1.0)
            token = chosen(slot, logits)
            if slot < len(guess) and token != guess[slot]:
                guess.clear()
            return token

        def chosen(slot: int, logits: torch.Tensor) -> int:
            if request.temperature == 0:
                return int(logits.argmax())
            laws.append(((logits - logits.max()) / request.temperature).softmax(-1))
            return draw(laws[-1], request.uniforms[slot])

        made = self._drafter.draft(
            request.anchor, request.position, context, request.length, choose, first=request.first
        )
        confidence = _own(made, request.temperature) if made.confidence is None else made.confidence
        fine = made.logits.isfinite().all(-1) & torch.tensor(confidence).isfinite()
        # Cut at the first that is not, not dropped whole: that hangs on the tokens drawn before it alone.
        good = int(fine.long().cumprod(0).sum())
        if not good:
            return NOTHING
        kept = torch.stack(laws[:good]).numpy() if laws else None
        return Proposal(tokens=made.tokens[:good], confidence=confidence[:good], laws=kept)


def draw(law: torch.Tensor, uniform: float) -> int:
    """The token at which the running sum of the law first exceeds its share `uniform`, in [0, 1), of the whole."""
    running = law.double().cumsum(-1)
    last = int((running < running[-1]).sum())  # the first at which nothing is left
    return min(int(torch.searchsorted(running, uniform * running[-1], right=True)), last)


def _own(made: Draft, temperature: float) -> list[float]:
    """How sure the drafter itself is of each place: its law's largest probability, whichever token was drawn."""
    return [float(p) for p in (made.logits / (temperature or 1.0)).softmax(-1).amax(-1)]
