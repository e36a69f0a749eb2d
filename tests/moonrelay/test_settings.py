from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from moonrelay.errors import SettingsError
from moonrelay.settings import load, redacted


class Demo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for these tests."""

    listen: str
    size: int = 4
    rate: float | None = None
    flag: bool = False
    redis_url: str | None = None
    api_key: str | None = None
    level: Literal["low", "high"] = "low"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise SettingsError(f"size must be at least 1, found {self.size}")


def test_flags_beat_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('listen = "file:1"\nsize = 7\nrate = 0.5\n')
    env = {"MOONRELAY_SIZE": "8", "MOONRELAY_FLAG": "true"}
    got = load(Demo, ["--config", str(file), "--listen", "flag:2"], env)
    assert got == Demo(listen="flag:2", size=8, rate=0.5, flag=True)


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        (["--listen", "x", "--size", "big"], {}, ["--size", "int", "big"]),
        (["--listen", "x"], {"MOONRELAY_RATE": "fast"}, ["MOONRELAY_RATE", "float", "fast"]),
        (["--listen", "x", "--size", "0"], {}, ["at least 1", "0"]),
        ([], {}, ["listen", "--listen", "MOONRELAY_LISTEN"]),
        (["--listen", "x", "--level", "mid"], {}, ["--level", "low, high", "mid"]),
        (["--config", "/nonexistent.toml"], {}, ["/nonexistent.toml"]),
    ],
)
def test_a_bad_value_names_its_source_and_the_expected_type(argv, env, words) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Demo, argv, env)
    for word in words:
        assert word in str(caught.value)


def test_a_file_with_an_unknown_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('listen = "a:1"\nsizee = 7\n')
    with pytest.raises(SettingsError, match="sizee"):
        load(Demo, ["--config", str(file)], {})


def test_secrets_are_not_printed() -> None:
    shown = redacted(Demo(listen="a:1", redis_url="redis://me:pw@host:1/0", api_key="k1"))
    assert "pw" not in str(shown) and "k1" not in str(shown)
    assert shown["redis_url"] == "redis://***@host:1/0"
