"""The committed golden sets are the ones that were handed over, byte for byte, and nothing else lies beside them."""

from __future__ import annotations

import hashlib

import pytest

from tests.golden import COMMITTED, DATA, SHARED, digests, golden_dir, shared_dir


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_sets_are_unaltered(name: str) -> None:
    assert golden_dir(name).is_dir()
    listed = {path for path in digests("SHA256SUMS") if path.startswith(f"{name}/")}
    assert listed == {str(path.relative_to(DATA)) for path in (DATA / name).rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", SHARED)
def test_shared_sets_are_unaltered_where_there_is_a_shared_folder(name: str) -> None:
    assert golden_dir(name).is_dir()


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_sets_equal_the_shared_ones(name: str) -> None:
    shared = shared_dir()
    if shared is None:
        pytest.skip("there is no shared folder")
    for path, digest in digests("SHA256SUMS").items():
        if path.startswith(f"{name}/"):
            assert hashlib.sha256((shared / "golden" / path).read_bytes()).hexdigest() == digest, path
