"""Where the golden data lies. Small sets are committed; larger ones are read from the shared folder."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

DATA = Path(__file__).resolve().parent / "data"
ROOT = DATA.parent.parent
COMMITTED = ("chat", "kda_op", "k3_tiny_mxfp4", "k3_tiny_smooth", "spec")
SHARED = ("k3_tiny", "kimi_linear_tiny")


def shared_dir() -> Path | None:
    """The shared folder; None only where nothing names it and none lies beside the checkout."""
    named = os.environ.get("MOONRELAY_SHARED")
    path = Path(named) if named else ROOT.parent / "shared"
    if not path.is_dir():
        # `.ci/run` exports the default place whether or not it exists, so naming that one is no promise.
        assert not named or path.resolve() == (ROOT.parent / "shared").resolve(), (
            f"MOONRELAY_SHARED: no folder {path}"
        )
        return None
    return path


def golden_dir(name: str) -> Path:
    """One set's folder, its files' digests checked. Committed sets never skip."""
    if name in COMMITTED:
        return _checked(DATA, "SHA256SUMS", name)
    shared = shared_dir()
    if shared is None:
        pytest.skip(f"golden set {name} is not committed and there is no shared folder")
    return _checked(shared / "golden", "SHARED_SHA256SUMS", name)


@cache
def golden_tensors(name: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file  # here, so that tests without tensors start without torch

    return load_file(golden_dir(name) / "golden.safetensors")


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error, in fp64; NaN and a wrong shape never pass for small."""
    assert found.shape == expected.shape, f"expected {list(expected.shape)}, found {list(found.shape)}"
    assert found.isfinite().all()
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def digests(sums: str) -> dict[str, str]:
    """`sha256sum`'s list: path -> digest."""
    lines = (DATA / sums).read_text().splitlines()
    return {path: digest for digest, path in (line.split("  ", 1) for line in lines)}


@cache
def _checked(root: Path, sums: str, name: str) -> Path:
    listed = {path: digest for path, digest in digests(sums).items() if path.startswith(f"{name}/")}
    assert listed, f"{sums} lists nothing of {name}"
    for path, digest in listed.items():
        assert (root / path).is_file(), f"{root / path} is missing"
        found = hashlib.sha256((root / path).read_bytes()).hexdigest()
        assert found == digest, f"{root / path} was altered: expected sha256 {digest}, found {found}"
    return root / name
