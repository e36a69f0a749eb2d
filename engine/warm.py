"""The warm-up: small requests through the ordinary path, so that the first real one meets nothing cold."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.api import EngineEvent, Failed, Finished, SamplingParams, SequenceSpec
from engine.settings import TILE_TOKENS
from moonrelay.errors import DeadlineExceeded

if TYPE_CHECKING:
    from engine.engine import Engine

BATCH = 8
DRAFTED_TOKENS = 24
TIMEOUT_S = 600.0  # a large checkpoint's pages may come from a slow disk


def warm(engine: Engine) -> None:
    """One prompt that crosses a tile, then a batch that uses the whole sampler. Needs an idle, started engine.

    With a drafter both once more, longer, so that drafts of every length have run.

    Raises: the error of a sequence that failed: such an engine must not be called ready.
    """
    greedy = SamplingParams(max_tokens=3)
    filtered = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, max_tokens=3, top_logprobs=1)
    vocab_size = engine.backend.config.vocab_size
    room = min(engine.settings.num_blocks * engine.settings.block_tokens, engine.backend.config.context_len)
    prompt = [i % vocab_size for i in range(min(TILE_TOKENS + 1, room - greedy.max_tokens))]
    specs = [SequenceSpec(request_id="warm-prompt", ids=prompt, sampling=greedy)]
    _run(engine, specs)
    count = min(BATCH, engine.settings.num_slots, engine.settings.num_blocks, engine.settings.max_batch_sequences)
    batch = [SequenceSpec(request_id=f"warm-{i}", ids=prompt[:2], sampling=filtered) for i in range(count)]
    _run(engine, batch)
    if engine.drafter is None:
        return
    engine.forget_drafts(costs=True)
    more = min(DRAFTED_TOKENS, room // (2 * count) - TILE_TOKENS)
    if more > greedy.max_tokens:
        for round_ in (specs, batch):
            _run(engine, [replace(spec, sampling=replace(spec.sampling, max_tokens=more)) for spec in round_])
    engine.forget_drafts(costs=True)  # a start is a busy time: what steps cost is soon learned, unlearned slowly


def _run(engine: Engine, specs: list[SequenceSpec]) -> None:
    ended: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()

    def emit(event: EngineEvent) -> None:
        if isinstance(event, Finished | Failed):
            ended.put(event)

    reservations = [engine.reserve(len(spec.ids) + spec.sampling.max_tokens) for spec in specs]
    try:
        for spec, reservation in zip(specs, reservations, strict=True):
            engine.submit(spec, reservation, emit)
        for _ in specs:
            event = ended.get(timeout=TIMEOUT_S)
            if isinstance(event, Failed):
                raise event.error
    except queue.Empty:
        raise DeadlineExceeded(f"the warm-up did not end within {TIMEOUT_S:.0f} s") from None
    finally:
        for reservation in reservations:
            engine.release(reservation)
