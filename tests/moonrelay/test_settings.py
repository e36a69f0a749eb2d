from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from cachestore.settings import CacheSettings
from decode.main import DecodeSettings
from moonrelay.demo import DemoSettings
from moonrelay.errors import SettingsError
from moonrelay.settings import ALL_NAMES, load, redacted
from moonrelay.up import UpSettings
from prefill.main import PrefillSettings
from router.settings import RouterSettings


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


@pytest.mark.parametrize(
    "kind", [CacheSettings, DecodeSettings, PrefillSettings, RouterSettings, UpSettings, DemoSettings]
)
def test_every_role_s_names_are_known_to_all(kind: type[msgspec.Struct]) -> None:
    assert set(kind.__struct_fields__) <= ALL_NAMES


def test_an_environment_name_that_is_no_setting_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    env = {"MOONRELAY_DRAM_BITES": "5", "MOONRELAY_DRAM_BYTES": "5", "MOONRELAY_SHARED": "s", "MOONRELAY_RATE": "1"}
    assert load(Demo, ["--listen", "x"], env, prog="moonrelay demo").rate == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == "moonrelay demo: environment MOONRELAY_DRAM_BITES: no setting has this name, ignored"


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (DecodeSettings, "reservation_ttl_ms", "-1"),
        (DecodeSettings, "max_batch_tokens", "99999999999"),
        (DecodeSettings, "queue_len_max", "-1"),
        (DecodeSettings, "handoff_lease_ms", "999999999999"),
        (PrefillSettings, "part_bytes", "0"),
        (PrefillSettings, "threads", "5000"),
        (PrefillSettings, "device_share", "nan"),
        (CacheSettings, "dram_bytes", f"{1 << 62}"),
        (CacheSettings, "replicate_after", "-1"),
    ],
)
def test_a_number_out_of_bounds_is_named_with_what_is_expected(kind, name: str, value: str) -> None:
    argv = ["--redis-url", "redis://127.0.0.1:1", f"--{name.replace('_', '-')}", value]
    argv += [] if kind is CacheSettings else ["--model-dir", "/nowhere"]
    with pytest.raises(SettingsError, match=f"^{name}: expected .* to .*, found {value}"):
        load(kind, argv, {})


def test_every_number_of_a_worker_or_a_node_has_bounds() -> None:
    for kind in (DecodeSettings, PrefillSettings, CacheSettings):
        for field in msgspec.structs.fields(kind):
            if field.type in (int, float):
                for value in ("-1", f"{1 << 62}"):
                    argv = ["--redis-url", "redis://127.0.0.1:1", f"--{field.name.replace('_', '-')}", value]
                    argv += ["--disk-dir", "d"] if field.name == "disk_bytes" else []
                    argv += [] if kind is CacheSettings else ["--model-dir", "/nowhere"]
                    with pytest.raises(SettingsError, match=f"^{field.name}: expected"):
                        load(kind, argv, {})
