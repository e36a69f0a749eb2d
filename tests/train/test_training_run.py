"""A whole small run: it learns, and a run resumed from a checkpoint ends in the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden import golden_dir
from tests.train.test_training_network import tiny_config
from train import data, plot
from train.run import LOG_FILE, Run, Settings, append_log

STEPS, LENGTH = 6, 64
PERIODS = {"text": 7, "chat": 5, "copy": 3, "validation": 7, "validation_chat": 5, "validation_copy": 3}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Rows of a repeating pattern under the toy vocabulary, much shorter than real ones."""
    (tmp_path / "rows").mkdir()
    for name, period in PERIODS.items():
        ids = (np.arange(8 * (LENGTH + 1)) % period + 97).astype(np.uint16).reshape(8, -1)
        np.savez(tmp_path / "rows" / f"{name}.npz", ids=ids, first=np.zeros_like(ids), counts=np.ones_like(ids))
    return Settings(
        work=tmp_path,
        folder=tmp_path / "run",
        copy_to=tmp_path / "copy",
        vocabulary=golden_dir("chat"),
        tokens=STEPS * 2 * LENGTH,
        minutes=None,
        compiled=False,
        validate_steps=3,
        end=0.0,  # rows this short hold no prompt to write from
    )


def config() -> dict[str, Any]:
    out = tiny_config()
    out["text_config"]["vocab_size"] = 476 + 256  # the toy vocabulary
    return out


def test_a_resumed_run_ends_in_the_same_bits(settings: Settings, keep_threads: None) -> None:
    torch.set_num_threads(1)
    whole = Run(replace(settings, folder=settings.work / "whole", copy_to=None), config())
    records: list[dict[str, Any]] = []
    whole.train(records.append)
    first = Run(settings, config())
    for _ in range(STEPS // 2):
        first.train_step()
    first.save()
    (settings.folder / "state.pt").unlink()  # as if the working tree were gone: the copy must do
    second = Run(settings, config())
    assert second.resume()
    assert second.step == STEPS // 2
    second.train(records.append)
    assert second.tokens == whole.tokens == STEPS * 2 * LENGTH
    for name, value in whole.params.items():
        assert torch.equal(second.params[name], value), name


def test_a_run_learns_and_plots(settings: Settings, keep_threads: None) -> None:
    torch.set_num_threads(1)
    run = Run(replace(settings, tokens=20 * 2 * LENGTH), config())
    before = run.validate("validation")
    run.train(lambda record: append_log(settings.folder, record))
    assert run.validate("validation") < 0.8 * before
    plot.write(settings.folder / LOG_FILE, settings.folder / "loss.svg")
    assert (settings.folder / "loss.svg").read_text().count("<polyline") == 2


def test_the_rate_warms_up_holds_and_cools(settings: Settings) -> None:
    run = Run(replace(settings, tokens=1_000, decay=0.25), config())
    assert run.rate() == pytest.approx(1 / 20)
    run.step = 100
    assert run.rate() == 1.0
    run.tokens = 875  # half of the cooling
    assert run.rate() == pytest.approx(0.51)
    run.tokens = 1_000
    assert run.rate() == pytest.approx(0.02)


def test_rows_hold_every_token_once_and_know_their_documents() -> None:
    documents = [[5] * 10, [6] * (data.ROW + 3), [7] * (2 * data.ROW)]
    ids, first = data.pack(documents)
    assert ids.shape == (3, data.ROW)  # the last 13 tokens fill no row
    assert ids.flatten().tolist() == [token for one in documents for token in one][: 3 * data.ROW]
    assert first[0].tolist() == [0] * 10 + [10] * (data.ROW - 10)
    assert first[1].tolist() == [0] * 13 + [13] * (data.ROW - 13)
