"""Models here are so small that their passes would stay on one thread: share them out, or threads go untested."""

from __future__ import annotations

import pytest

from model.native.backend import NativeBackend


@pytest.fixture(autouse=True)
def small_passes_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeBackend, "share_from_macs", 0.0)
