"""Fixtures for tests that start real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.cluster.harness import Cluster, running_cluster


@pytest.fixture(scope="session")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Cluster]]:
    return lambda *args: running_cluster(tmp_path_factory.mktemp("cluster"), *args)


@pytest.fixture(scope="session")
def cluster(start_cluster: Callable[..., AbstractContextManager[Cluster]]) -> Iterator[Cluster]:
    """One disaggregated cluster that tests which do not kill anything share."""
    with start_cluster() as running:
        yield running
