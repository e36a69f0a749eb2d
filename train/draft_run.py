"""A run of drafter training: its budget, log, progress lines and files; and the loop for one process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from train import plot
from train.draft_data import Sample
from train.draft_roles import DraftSettings, GeneratorRole, PromptSource, TrainerRole

STATE_FILE, LOG_FILE, CURVE_FILE, EXPORT = "state.pt", "log.jsonl", "acceptance.svg", "drafter"
EVALUATE_S = 300.0  # between looks at the held-out prompts
SAVE_S = 120.0
CURVES = (
    ("held_out_code", "#4a7ebb", "tokens a verify step, held-out code"),
    ("held_out_prose", "#c0504d", "tokens a verify step, held-out prose"),
    ("held_out_code_drawn", "#8fb3dd", "the same, code at temperature 1"),
    ("held_out_prose_drawn", "#dd9a98", "the same, prose at temperature 1"),
)


class Journal:
    """How much of a run's budget is used, across resumes, and what it has to show.

    `now_s` is a monotonic clock. Units: minutes of wall time.
    """

    def __init__(self, folder: Path, minutes: float, now_s: Callable[[], float] = time.monotonic) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._minutes, self._now_s = folder, minutes, now_s
        self._log = folder / LOG_FILE
        records = [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []
        self._begun_s = now_s() - (60.0 * records[-1]["minutes"] if records else 0.0)
        self._headline: dict[str, Any] = {}
        for record in records:
            self._keep_headline(record)
        self._due = {"evaluate": now_s() if not records else now_s() + EVALUATE_S, "save": now_s() + SAVE_S}

    def minutes(self) -> float:
        return (self._now_s() - self._begun_s) / 60.0

    def progress(self) -> float:
        """The share of the budget that is used, at most 1."""
        return min(1.0, self.minutes() / self._minutes)

    def due(self, what: str) -> bool:
        """Whether it is time to `evaluate` or to `save`; if so, the next time is set."""
        if self._now_s() < self._due[what]:
            return False
        self._due[what] = self._now_s() + {"evaluate": EVALUATE_S, "save": SAVE_S}[what]
        return True

    def _keep_headline(self, record: Mapping[str, Any]) -> None:
        self._headline |= {name: record[name] for name, *_ in CURVES if name in record}

    def write(self, record: Mapping[str, Any]) -> str:
        """Append to the log; returns the progress line, held-out acceptance first."""
        self._keep_headline(record)
        full = {"minutes": round(self.minutes(), 2), **record}
        with self._log.open("a") as log:
            log.write(json.dumps(full) + "\n")
        shown = {name.removeprefix("held_out_"): value for name, value in self._headline.items()}
        head = " ".join(f"{name} {value:.2f}" for name, value in shown.items()) or "not measured yet"
        rest = {name: value for name, value in full.items() if name not in self._headline}
        body = " ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in rest.items()
        )
        return f"tokens a step: {head} | {body}"

    def draw(self) -> None:
        """The curve of held-out acceptance, if there is one yet."""
        if self._headline:
            plot.write(self._log, self.folder / CURVE_FILE, series=CURVES, along="slots")


def run_alone(
    settings: DraftSettings,
    prompts: PromptSource,
    held_out: list[Sample],
    journal: Journal,
    show: Callable[[str], None],
) -> None:
    """Generator and trainer by turns in this process: what the actors do, without Ray."""
    state, export = settings.folder / STATE_FILE, settings.folder / EXPORT
    trainer = TrainerRole(settings, 0)
    generator = GeneratorRole(settings, prompts, settings.seed + trainer.restore(state))
    written = 0
    while journal.progress() < 1.0:
        tokens, samples = generator.produce(settings.batch_samples)
        written += tokens
        numbers, learnt = trainer.learn(journal.progress(), samples)
        if learnt is not None and journal.due("evaluate"):
            numbers |= trainer.evaluate(held_out)
        if learnt is not None and journal.due("save"):
            trainer.save(state, export)
        show(journal.write(numbers | {"tokens": written}))
    trainer.save(state, export)
    show(journal.write(trainer.evaluate(held_out)))
    journal.draw()
