"""A drafter beside its target: loaded by name or refused, and its rows lie where the target never looks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model.backend import load_draft_model
from model.batch import Segment
from model.drafter.config import parse_drafter_config
from model.drafting import DraftRequest
from model.errors import ConfigError
from tests.model.runs import KINDS, Pools, backend
from tests.model.test_drafter import WHERE, random_tensors, small, target

MODEL, BLOCK_TOKENS = "k3_tiny_mxfp4", 16


def save(where: Path, change: dict[str, Any] | None = None) -> Path:
    raw = small("dspark")
    tensors = random_tensors(parse_drafter_config(raw, target(), path=WHERE))
    (where / "config.json").write_text(json.dumps(raw | (change or {})))
    save_file(tensors, where / "model.safetensors")
    return where


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_named_by_its_target_too(tmp_path: Path, kind: str) -> None:
    load = {"kind": kind, "threads": 1}
    engine = backend(MODEL, kind)
    one, same, other = (
        load_draft_model(save(tmp_path), engine, target_revision=revision, **load) for revision in ("a", "a", "b")
    )
    assert one.drafter_id == same.drafter_id != other.drafter_id
    assert (one.target_layers, one.block_len, one.draft_width) == ((1, 2), 4, 2 * 20)
    with pytest.raises(ConfigError, match="target_layer_ids"):
        load_draft_model(save(tmp_path, {"target_layer_ids": [1, 99]}), engine, target_revision="a", **load)


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_steps_over_the_drafters_rows(kind: str) -> None:
    """The same bits with and without room for a drafter, and that room stays as it was."""
    engine = backend(MODEL, kind)
    width, ids = 11, [i % 61 for i in range(2 * BLOCK_TOKENS + 3)]
    results = []
    for draft_width in (0, width):
        engine.draft_width = draft_width
        try:
            layout = engine.layout(BLOCK_TOKENS)
            assert layout == replace(engine.config.pool_layout(BLOCK_TOKENS), draft_width=draft_width)
            pools = Pools(layout, 1, 4)
            blocks = pools.take(len(ids))
            logits = [
                engine.forward([Segment(ids=part, start=at, slot=0, blocks=blocks)], pools.rows, pools.state)
                for part, at in ((ids[:-1], 0), (ids[-1:], len(ids) - 1))
            ]
        finally:
            engine.draft_width = 0
        results.append((*logits, pools.rows[:, : layout.mla_floats].nan_to_num(7.0), pools.state))
        assert pools.rows[:, layout.mla_floats :].isnan().all()
    for plain, wider in zip(*results, strict=True):
        assert torch.equal(plain, wider)


@pytest.mark.parametrize("kind", KINDS)
def test_the_targets_taps_make_a_draft(tmp_path: Path, kind: str) -> None:
    """Verifying and rows in one pool: what the native target taps, either drafter takes."""
    engine = backend(MODEL, "native")
    drafter = load_draft_model(save(tmp_path), engine, kind=kind, threads=1, target_revision="")
    engine.draft_width = drafter.draft_width
    try:
        engine.tap(drafter.target_layers)
        pools = Pools(engine.layout(BLOCK_TOKENS), 1, 4)
        blocks = pools.take(20)
        taps = torch.empty(20, 2, engine.config.hidden_size)
        segment = Segment(ids=list(range(20)), start=0, slot=0, blocks=blocks)
        engine.forward([segment], pools.rows, pools.state, taps=taps)
        drafter.write_rows([segment], taps, pools.rows)
        request = DraftRequest(anchor=3, position=20, blocks=blocks, length=4)
        (proposal,) = drafter.draft([request], pools.rows)
    finally:
        engine.draft_width = 0
    assert len(proposal.tokens) == len(proposal.confidence) == 4
    assert all(0 < p < 1 for p in proposal.confidence)
