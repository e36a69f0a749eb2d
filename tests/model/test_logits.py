"""`moonrelay logits` writes every position's logits, and says clearly what it cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model import logits
from tests.golden import golden_tensors, relative_error

NAME = "k3_tiny_mxfp4"


@pytest.mark.parametrize("length", [1, 200])
def test_golden_logits(tiny_model_dir: Path, tmp_path: Path, length: int) -> None:
    golden, out = golden_tensors(NAME), tmp_path / "out.safetensors"
    ids = ",".join(map(str, golden[f"len{length}.ids"].tolist()))
    assert logits.main([str(tiny_model_dir), "--ids", ids, "--out", str(out), "--backend", "torch"]) == 0
    found = load_file(out)
    assert list(found) == ["logits"]
    assert relative_error(found["logits"], golden[f"len{length}.logits"]) < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


def test_long_prompts_from_a_file_come_in_chunks(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Longer than a chunk: the first part is that of the shorter prompt, bit for bit."""
    ids = torch.randint(0, 272, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    (tmp_path / "ids").write_text("\n".join(map(str, ids)))
    (tmp_path / "head").write_text(",".join(map(str, ids[:256])))
    for name in ("ids", "head"):
        argv = [str(tiny_model_dir), "--ids-file", str(tmp_path / name), "--out", str(tmp_path / f"{name}.out")]
        assert logits.main([*argv, "--backend", "torch"]) == 0
    whole, head = (load_file(tmp_path / f"{name}.out")["logits"] for name in ("ids", "head"))
    assert whole.shape == (300, 272)
    assert torch.equal(whole[:256], head)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("", "at least one token id"),
        (" , ", "at least one token id"),
        ("1,2,x", "'x'"),
        ("1.5", "'1.5'"),
        ("1_0", "'1_0'"),
        ("1,272", "position 1: expected 0 to 271, found 272"),
        ("-1", "position 0: expected 0 to 271, found -1"),
        ("9" * 30, "position 0: expected 0 to 271"),
        (",".join(["1"] * 4097), "at most 4096 ids"),
    ],
)
def test_refused_ids(
    tiny_model_dir: Path, tmp_path: Path, ids: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert logits.main([str(tiny_model_dir), f"--ids={ids}", "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["model", "ids", "out"])
def test_refused_paths(
    tiny_model_dir: Path, tmp_path: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "nowhere" / "at-all"
    model = nowhere if missing == "model" else tiny_model_dir
    source = ["--ids-file", str(nowhere)] if missing == "ids" else ["--ids", "1"]
    out = nowhere if missing == "out" else tmp_path / "out"
    assert logits.main([str(model), *source, "--out", str(out), "--backend", "torch"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_bytes_that_are_no_ids(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids").write_bytes(b"\xff\x00\x80")
    argv = [str(tiny_model_dir), "--ids-file", str(tmp_path / "ids"), "--out", str(tmp_path / "out")]
    assert logits.main(argv) == 2
    assert str(tmp_path / "ids") in capsys.readouterr().err


def test_one_source_of_ids_is_required(tiny_model_dir: Path, tmp_path: Path) -> None:
    for source in ([], ["--ids", "1", "--ids-file", "x"]):
        with pytest.raises(SystemExit) as exit_info:
            logits.main([str(tiny_model_dir), *source, "--out", str(tmp_path / "out")])
        assert exit_info.value.code == 2
