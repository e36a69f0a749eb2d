"""What a worker says about the checkpoint it loaded."""

from __future__ import annotations

import pytest
import torch

from engine.worker.model import load_model
from engine.worker.settings import WorkerSettings
from model.errors import ModelError
from tests.golden import golden_dir


def settings(**changes) -> WorkerSettings:
    base = {"model_dir": str(golden_dir("k3_tiny_smooth")), "redis_url": "unix:///nowhere", "backend": "torch"}
    return WorkerSettings(**{**base, **changes})


def test_threads_left_open_are_measured(keep_threads):
    lines: list[str] = []
    loaded = load_model(settings(), lines.append)
    assert loaded.threads in (1, 2) and loaded.name == "k3-tiny-smooth"
    assert loaded.fingerprint.numerics_version == f"{loaded.backend.name}/invariant"
    assert any(f"{loaded.threads} threads" in line for line in lines)


def test_beside_the_native_backend_torch_has_no_threads_that_could_spin(keep_threads):
    torch.set_num_threads(2)
    assert load_model(settings(backend="native", threads=2), lambda line: None).threads == 2
    assert torch.get_num_threads() == 1


def test_other_weights_or_arithmetic_are_another_fingerprint(keep_threads):
    def fingerprint(**changes):
        return load_model(settings(threads=1, **changes), lambda line: None).fingerprint

    found = [
        fingerprint(),
        fingerprint(numerics="fast"),
        fingerprint(block_tokens=128),
        fingerprint(snapshot_dtype="bf16"),
        fingerprint(snapshot_dtype="fp8"),
        fingerprint(model_dir=str(golden_dir("k3_tiny_mxfp4"))),
    ]
    assert len(set(found)) == len(found)
    assert fingerprint() == found[0]


def test_a_folder_that_holds_no_checkpoint_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ModelError, match=tmp_path.name):
        load_model(settings(model_dir=str(tmp_path)), lambda line: None)
