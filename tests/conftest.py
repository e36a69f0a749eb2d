"""Fixtures every test may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden import golden_dir, shared_dir


@pytest.fixture(scope="session", name="shared_dir")
def shared_dir_fixture() -> Path:
    """The shared folder; the test skips only where nothing names it and none lies beside the checkout."""
    path = shared_dir()
    if path is None:
        pytest.skip("there is no shared folder")
    return path


@pytest.fixture(scope="session")
def tiny_model_dir() -> Path:
    """A committed K3-form checkpoint with MXFP4 experts in three shards."""
    return golden_dir("k3_tiny_mxfp4")


@pytest.fixture
def keep_threads() -> Iterator[None]:
    """Puts torch's thread count back after a test that changes it, and its small numbers, which trainers flush."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
