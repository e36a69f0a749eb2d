"""Makes the folder's helpers importable by name, and a real Valkey."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonrelay.valkey import LocalValkey, start_local_valkey

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalValkey]:
    server = start_local_valkey(tmp_path_factory.mktemp("valkey"))
    yield server
    server.stop()
