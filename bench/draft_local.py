"""Acceptance and costs of drafting, step by step: the engine in this process, turned by hand.

Only here is every step seen for itself: which tokens it kept, and whether it lay in a loop of its output.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from draft_prompts import KINDS, Prompt, looped

from engine.api import EngineEvent, Failed, Finished, SamplingParams, SequenceSpec, TokenSampled
from engine.engine import Engine
from engine.observer import NullObserver, StepReport
from engine.settings import EngineSettings
from engine.worker.cores import usable_cores
from engine.worker.model import AUTO_THREADS
from model.backend import load_backend, load_draft_model
from model.checkpoint import weights_revision
from model.drafting import DraftModel
from model.ngram import NgramDrafter

BLOCK_TOKENS = 64
AT_ONCE = 8
READ_LEN_MAX = 31  # as decode has it by default
PARTS = ("forward", "sample", "fold")  # of a step's total; drafts, and most rows, are made between steps
COSTS = (*PARTS, "draft", "rows", "total")


@dataclass
class Output:
    """One prompt's tokens and the steps that gave them: (index of the step's first token, tokens it kept)."""

    kind: str
    ids: list[int] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    end: Finished | None = None


class Costs(NullObserver):
    """Sums what steps that only decode report, apart by whether they verified drafts."""

    def __init__(self) -> None:
        self.steps: dict[str, list[StepReport]] = defaultdict(list)

    def step_done(self, report: StepReport) -> None:
        if report.num_prompt_tokens == 0:
            self.steps["verify" if report.num_drafted else "plain"].append(report)

    def summary(self) -> dict[str, Any]:
        """Milliseconds a step, medians; `other_ms` is what no part accounts for, and drafts come on top."""
        found: dict[str, Any] = {}
        for kind, reports in self.steps.items():
            parts = {name: [getattr(report, f"{name}_s") for report in reports] for name in COSTS}
            known = zip(*(parts[name] for name in PARTS), strict=True)
            parts["other"] = [total - sum(times) for total, times in zip(parts["total"], known, strict=True)]
            found[kind] = {f"{name}_ms": round(statistics.median(v) * 1e3, 4) for name, v in parts.items()} | {
                "steps": len(reports),
                "tokens_in_pass": round(statistics.mean(r.num_decode_tokens for r in reports), 2),
            }
        return found


class Local:
    """A model in this process; `run` makes an engine of its own for every question."""

    def __init__(self, model_dir: Path, drafter_dir: Path | None) -> None:
        torch.set_num_threads(1)
        threads = min(AUTO_THREADS, usable_cores())  # as a worker chooses
        self.backend = load_backend(model_dir, kind="auto", threads=threads, numerics="invariant")
        self.drafters: dict[str, DraftModel | None] = {"none": None, "ngram": NgramDrafter()}
        if drafter_dir is not None:
            served = load_draft_model(
                drafter_dir, self.backend, kind="auto", threads=threads, target_revision=weights_revision(model_dir)
            )
            self.drafters |= {"drafter": served, "network": served.inner}  # as served, and without its own lookup

    def run(
        self,
        name: str,
        prompts: Sequence[Prompt],
        *,
        tokens: int,
        temperature: float = 0.0,
        length: int = 0,
        adaptive: bool = False,
        at_once: int = AT_ONCE,
    ) -> tuple[list[Output], Costs]:
        """Generate `tokens` after every prompt, `at_once` sequences at a time, with drafts of `length` at most."""
        longest = max(len(prompt.ids) for prompt in prompts) + tokens
        settings = EngineSettings(
            block_tokens=BLOCK_TOKENS, num_blocks=at_once * (longest // BLOCK_TOKENS + 1), num_slots=at_once + 1,
            max_batch_sequences=at_once, draft_len_max=length, draft_adaptive=adaptive, writeback="off",
            draft_read_len_max=READ_LEN_MAX if adaptive and length else 0,
        )  # fmt: skip
        costs = Costs()
        engine = Engine(self.backend, settings, drafter=self.drafters[name], observer=costs)
        outputs = [Output(prompt.kind) for prompt in prompts]
        waiting, live = list(range(len(prompts))), 0
        while waiting or live:
            while waiting and live < at_once:
                index = waiting.pop(0)
                sampling = SamplingParams(temperature=temperature, seed=index, max_tokens=tokens)
                self._submit(engine, index, prompts[index], outputs[index], sampling)
                live += 1
            before = [len(output.ids) for output in outputs]
            engine.turn()
            for index, output in enumerate(outputs):
                if len(output.ids) > before[index]:
                    output.steps.append((before[index], len(output.ids) - before[index]))
            live = sum(output.end is None for output in outputs) - len(waiting)
        return outputs, costs

    def _submit(self, engine: Engine, number: int, prompt: Prompt, output: Output, sampling: SamplingParams) -> None:
        reservation = engine.reserve(len(prompt.ids) + sampling.max_tokens)

        def emit(event: EngineEvent) -> None:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, TokenSampled):
                output.ids.append(event.token.id)
            elif isinstance(event, Finished):
                output.end = event
                engine.release(reservation)

        engine.submit(SequenceSpec(request_id=str(number), ids=prompt.ids, sampling=sampling), reservation, emit)


def acceptance(outputs: Iterable[Output], ends: frozenset[int]) -> dict[str, Any]:
    """Mean tokens a step by kind of prompt, over steps outside loops; and over those before the text's first end.

    The prompt's own pass draws the first token, and the last step may be cut short by the length: neither counts.
    `ends`: ids behind which another text begins.
    """
    kept: dict[str, list[int]] = defaultdict(list)
    own: dict[str, list[int]] = defaultdict(list)
    in_loops: dict[str, list[bool]] = defaultdict(list)
    for output in outputs:
        loops = looped(output.ids)
        end = next((i for i, token in enumerate(output.ids) if token in ends), len(output.ids))
        for first, count in output.steps[1:-1]:
            in_loops[output.kind].append(loops[first])
            if not loops[first]:
                kept[output.kind].append(count)
                if first + count <= end:
                    own[output.kind].append(count)
    return {
        kind: {
            "tokens_per_step": round(statistics.mean(kept[kind]), 4),
            "tokens_per_step_in_own_text": round(statistics.mean(own[kind]), 4) if own[kind] else None,
            "steps": len(kept[kind]),
            "looped_share": round(statistics.mean(in_loops[kind]), 4),
            "tokens_per_step_with_loops": round(
                statistics.mean(c for o in outputs if o.kind == kind for _, c in o.steps[1:-1]), 4
            ),
        }
        for kind in KINDS
        if kept[kind]
    }
