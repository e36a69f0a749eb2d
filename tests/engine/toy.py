"""A toy model in exact integer arithmetic whose logits depend on every token, row and state float that they should.

Each token's row holds a running hash; the state holds that hash and the token count; logits mix the state with a sum
over all rows, read back from the pool. A wrong slot, start, block, order or a stale byte changes every later token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from engine.api import EngineEvent, Failed, Finished, SampledToken, SamplingParams, SequenceSpec, TokenSampled
from engine.core import Draw
from engine.engine import Engine
from engine.judge import draw
from engine.pools import mapped_floats
from engine.settings import EngineSettings
from model.batch import PoolLayout, Segment

VOCAB = 97
PRIME = 65_521  # sums of products below stay exact in int64, values in fp32


class ToyBackend:
    name = "toy"

    def __init__(self, *, context_len: int = 4096, nan_after: int | None = None) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB, context_len=context_len)
        self.nan_after = nan_after  # logits after this id are not finite
        self.raise_next: BaseException | None = None
        self.during_next: Callable[[], None] | None = None  # what other threads do while a pass runs
        self.batches: list[list[tuple[int, int]]] = []  # (start, length) of every segment of every pass

    def layout(self, block_tokens: int) -> PoolLayout:
        return PoolLayout(
            block_tokens=block_tokens, num_mla_layers=2, row_width=3, num_kda_layers=1, num_heads=1, key_dim=2,
            value_dim=2, conv_history=3,
        )  # fmt: skip

    def forward(
        self, segments: Sequence[Segment], rows: torch.Tensor, state: torch.Tensor, *, progress=None
    ) -> torch.Tensor:
        self.batches.append([(s.start, len(s.ids)) for s in segments])
        slots = [s.slot for s in segments]
        assert len(set(slots)) == len(slots), "two segments share a slot"
        logits = [self._segment(s, rows, state) for s in segments]
        if self.during_next is not None:
            act, self.during_next = self.during_next, None
            act()
        if self.raise_next is not None:  # after the writes: a failed pass leaves half-written memory behind
            error, self.raise_next = self.raise_next, None
            raise error
        wanted = [out for out, s in zip(logits, segments, strict=True) if s.logits == "last"]
        return torch.from_numpy(np.stack(wanted)) if wanted else torch.empty(0, VOCAB)

    def _segment(self, segment: Segment, rows: torch.Tensor, state: torch.Tensor) -> np.ndarray:
        block_tokens = rows.shape[1] // 6
        pool, slot = rows.numpy().reshape(-1, 2, block_tokens, 3), state[segment.slot].numpy()
        running = 0
        if segment.start:
            assert slot[-1] == segment.start, f"the state holds {slot[-1]} tokens, not {segment.start}"
            running = int(slot[0])
        for position, token in enumerate(segment.ids, start=segment.start):
            running = (running * 31 + token + 1) % PRIME
            pool[segment.blocks[position // block_tokens], :, position % block_tokens] = running, token, position
        slot[:] = running
        end = segment.start + len(segment.ids)
        slot[-1] = end
        covered = list(segment.blocks[: -(-end // block_tokens)])
        seen = pool[covered, 1].reshape(-1, 3)[:end].astype(np.int64)
        assert (seen[:, 2] == np.arange(end)).all(), "rows of other positions"
        mixed = int((seen[:, 0] * (np.arange(end) % 251 + 1) % PRIME).sum() % PRIME)
        values = (np.arange(VOCAB) * 7919 + 1) * (running + 1) % PRIME + np.arange(VOCAB) * mixed % PRIME
        logits = (values % PRIME / PRIME * 6).astype(np.float32)
        if self.nan_after is not None and segment.ids[-1] == self.nan_after:
            logits[3] = np.nan
        return logits


def shifted(logits: np.ndarray, sampling: SamplingParams, said: Sequence[int]) -> np.ndarray:
    """Bias and penalties as OpenAI's API says them, from all that was said."""
    counts = np.bincount(said, minlength=VOCAB) if said else np.zeros(VOCAB)
    change = -sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    for token, bias in sampling.logit_bias:
        change[token] += bias
    return logits + change.astype(np.float32)


def alone(ids: Sequence[int], sampling: SamplingParams, *, draws: int | None = None) -> list[SampledToken]:
    """The oracle: the prompt in one piece, then one token at a time, with memory of its own and no engine."""
    backend = ToyBackend()
    layout = backend.layout(64)
    draws = sampling.max_tokens if draws is None else draws
    num_blocks = (len(ids) + draws) // 64 + 1
    rows, state = mapped_floats(num_blocks, layout.block_floats), mapped_floats(1, layout.slot_floats)
    tokens: list[SampledToken] = []
    start, pending = 0, list(ids)
    while len(tokens) < draws:
        segment = Segment(ids=pending, start=start, slot=0, blocks=range(num_blocks))
        logits = backend.forward([segment], rows, state).numpy()
        start += len(pending)
        said = [*sampling.generated, *(token.id for token in tokens)]
        (token,) = draw(shifted(logits, sampling, said), [Draw(params=sampling, position=start)], "block")
        assert isinstance(token, SampledToken)
        tokens.append(token)
        if token.id in sampling.stop_token_ids:
            break
        pending = [token.id]
    return tokens


class Client:
    """Keeps what one sequence was told, and insists that nothing follows the last event."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []

    def __call__(self, event: EngineEvent) -> None:
        assert self.end is None, f"{event} after {self.end}"
        self.events.append(event)

    @property
    def end(self) -> Finished | Failed | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Finished | Failed) else None

    @property
    def tokens(self) -> list[SampledToken]:
        return [e.token for e in self.events if isinstance(e, TokenSampled)]


def quiet_engine(backend: ToyBackend | None = None, **changes: int) -> Engine:
    """An engine without a thread: the test calls `turn`."""

    def fatal(error: BaseException) -> None:
        raise error

    small = {"num_blocks": 40, "num_slots": 8, "max_batch_tokens": 192, "max_batch_sequences": 4, "queue_len_max": 4}
    return Engine(backend or ToyBackend(), EngineSettings(**{**small, **changes}), on_fatal=fatal)


def finish(engine: Engine, *, turns_max: int = 10_000) -> None:
    """Turn until idle; an engine that never falls idle fails the test."""
    for _ in range(turns_max):
        if not engine.turn():
            engine.check()
            return
    raise AssertionError("the engine never fell idle")


def start(
    engine: Engine, ids: Sequence[int], sampling: SamplingParams, *, name: str = "r", **spec: object
) -> tuple[Client, object]:
    """Reserve and submit; returns the client and the reservation."""
    client = Client()
    reservation = engine.reserve(len(ids) + sampling.max_tokens + int(spec.get("restored", 0)))
    engine.submit(SequenceSpec(request_id=name, ids=ids, sampling=sampling, **spec), reservation, client)
    return client, reservation
