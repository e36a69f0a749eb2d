"""Which drafter a worker starts with: its checkpoint's own, a named one, or none; and never another target's."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode.main import DecodeSettings
from engine.settings import EngineSettings
from engine.worker.model import load_model
from engine.worker.process import serve
from engine.worker.settings import WorkerSettings
from model.errors import BackendUnavailable, ModelError
from tests.golden import golden_dir
from tests.workers.drafts import write_drafter


def settings(**changes) -> WorkerSettings:
    base = {"model_dir": str(golden_dir("k3_tiny_smooth")), "redis_url": "unix:///nowhere", "threads": 1}
    return WorkerSettings(**{**base, **changes})


@pytest.fixture
def with_drafter(tmp_path: Path) -> Path:
    """The checkpoint with a drafter of its own beside it."""
    folder = tmp_path / "k3_tiny_smooth"
    folder.mkdir()
    for file in golden_dir("k3_tiny_smooth").iterdir():
        (folder / file.name).symlink_to(file)
    write_drafter(folder / "drafter")
    return folder


def test_a_checkpoints_own_drafter_is_loaded_unless_told_otherwise(with_drafter, tmp_path):
    lines: list[str] = []
    own = load_model(settings(model_dir=str(with_drafter)), lines.append)
    assert own.drafter is not None and any(own.drafter_id in line for line in lines)
    assert own.layout.draft_width == own.drafter.draft_width > 0
    off = load_model(settings(model_dir=str(with_drafter), drafter="off"), lines.append)
    assert (off.drafter, off.drafter_id, off.layout.draft_width) == (None, "", 0)
    assert off.fingerprint == own.fingerprint  # what the cache holds of the target is the same
    named = load_model(settings(drafter=str(write_drafter(tmp_path / "named", seed=3))), lines.append)
    assert named.drafter_id not in ("", own.drafter_id)
    assert load_model(settings(), lines.append).drafter is None


def test_a_backend_that_cannot_verify_goes_without_unless_a_drafter_was_named(with_drafter):
    lines: list[str] = []
    torch = {"model_dir": str(with_drafter), "backend": "torch"}
    assert load_model(settings(**torch), lines.append).drafter is None
    assert any("cannot verify drafts" in line for line in lines)
    with pytest.raises(BackendUnavailable, match="cannot verify drafts"):
        load_model(settings(**torch, drafter=str(with_drafter / "drafter")), lines.append)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"target_num_hidden_layers": 93}, "target_num_hidden_layers"), ({"target_layer_ids": [1, 99]}, "layer_ids")],
)
def test_a_drafter_of_another_target_ends_the_start_with_its_name(tmp_path, capsys, change, named):
    folder = write_drafter(tmp_path / "drafter", **change)
    chosen = settings(drafter=str(folder))
    with pytest.raises(ModelError, match=named):
        load_model(chosen, lambda line: None)
    assert serve(chosen, role="prefill", source="prefill", service_name="x", assemble=None) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("cannot serve") and named in said and str(folder) in said


def test_a_named_folder_without_a_drafter_ends_the_start(tmp_path):
    with pytest.raises(ModelError, match=tmp_path.name):
        load_model(settings(drafter=str(tmp_path)), lambda line: None)


def test_decode_drafts_by_default_and_prefill_only_writes_rows():
    base = {"model_dir": "m", "redis_url": "r"}
    assert WorkerSettings(**base).engine() == EngineSettings()
    assert DecodeSettings(**base).engine().draft_len_max == 15
