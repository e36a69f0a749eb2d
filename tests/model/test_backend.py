"""Which backend is chosen, and that it is said."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import model.native.backend
from model.backend import load_backend
from model.errors import BackendUnavailable
from tests.model.runs import backend


class Unbuildable:
    def __init__(self, *args: object) -> None:
        raise BackendUnavailable("no compiler here")


def test_torch_takes_over_where_native_cannot_run(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model.native.backend, "NativeBackend", Unbuildable)
    with caplog.at_level(logging.INFO, "model.backend"):
        chosen = load_backend(tiny_model_dir, kind="auto", threads=1, numerics="invariant")
    assert chosen.name == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "native backend unavailable, torch takes over",
        "backend resolved",
    ]
    assert caplog.records[0].reason == "no compiler here"
    assert caplog.records[1].backend == "torch"


def test_native_asked_for_is_native_or_an_error(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.native.backend, "NativeBackend", Unbuildable)
    with pytest.raises(BackendUnavailable, match="no compiler here"):
        load_backend(tiny_model_dir, kind="native", threads=1, numerics="invariant")


def test_native_is_preferred(tiny_model_dir: Path) -> None:
    assert backend("k3_tiny_mxfp4", "native").name == "native"  # skips only without a compiler
    assert load_backend(tiny_model_dir, kind="auto", threads=1, numerics="invariant").name == "native"
