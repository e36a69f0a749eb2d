"""A real Valkey for this folder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonrelay.valkey import LocalValkey, start_local_valkey


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalValkey]:
    server = start_local_valkey(tmp_path_factory.mktemp("valkey"))
    yield server
    server.stop()
