"""What the drafter's bench counts: loops, prose, and prompts that are held out by rule."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("draft_prompts", BENCH / "draft_prompts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_step_is_in_a_loop_when_its_last_window_occurred_earlier(bench):
    assert bench.looped([1, 2, 3, 1, 2, 3, 1], window=3) == [False] * 6 + [True, True]
    assert bench.looped([5] * 6, window=3) == [False] * 4 + [True] * 3
    assert not any(bench.looped(list(range(40))))
    assert bench.looped([], window=3) == [False]


def test_prose_is_sentences_alone(bench):
    source = '''
def f(x):
    """Return what the caller has asked for, or nothing at all where that cannot be had in time.

    >>> f(1) and a great many more characters, so that length alone would not keep this one out
    2

    :param x: what is asked for, which is told at some length here to be long enough for a paragraph
    """
'''
    assert bench.prose_of(source) == (
        "Return what the caller has asked for, or nothing at all where that cannot be had in time."
    )


def test_without_archives_nothing_is_made_up(bench, tmp_path, monkeypatch):
    def fetch(sources, folder):
        raise OSError("no network")

    monkeypatch.setattr(bench.heldout.corpus, "fetch", fetch)
    with pytest.raises(bench.NoHeldOut, match="not in"):
        bench.held_out_prompts(None, 4, downloads=tmp_path)
