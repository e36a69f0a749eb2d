"""Settings: file < environment < flags, into one frozen struct per role; unknown names are errors.

A role's struct is the single owner of its names, types, defaults and checks. `load` builds it:
    --config F        TOML; keys are field names
    MOONRELAY_X=...   for field `x`
    --x ...           for field `x`, with dashes for underscores
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from moonrelay.errors import SettingsError

ENV_PREFIX = "MOONRELAY_"
NOT_SETTINGS = {"MOONRELAY_SHARED", "MOONRELAY_CACHE_DIR", "MOONRELAY_CONFIG", "MOONRELAY_BENCH_DIR"}
# Of every role: an environment is shared by processes of several, and a role does not import another to ask.
_ALL_NAMES = """
    admission_wait_ms advertise_host aggregated attempts_max backend block_tokens body_bytes_max body_timeout_ms cache
    cachestore cluster connect_timeout_ms decode default_max_tokens device_share disk_bytes disk_dir draft
    draft_adaptive draft_len_max draft_read_len_max draft_rule drafter drain_ms drain_timeout_ms dram_bytes
    encodings_tokens_max grpc_listen handoff_lease_ms handoff_timeout_ms host ids_bytes_max ids_timeout_ms ids_ttl_s
    in_flight_max instance_id listen log_level longest_transfer_ms max_batch_sequences max_batch_tokens max_tokens
    metrics_listen model model_dir model_name num_blocks num_slots numerics part_bytes port prefill
    prefill_share_tokens publish_inflight_max pull_timeout_ms queue_len_max queue_timeout_ms ready_file
    ready_timeout_s recoveries_max recovery_wait_ms redis_url replicate_after request_deadline_ms reservation_ttl_ms
    retries_max room_retry_ms router rpc_timeout_ms served_model_name snapshot_dtype stall_timeout_ms
    stream_interval_ms suspect_ms threads transfer_min_bytes_per_s transport verbose writeback
"""
ALL_NAMES = frozenset(_ALL_NAMES.split())
DAY_MS = 86_400_000  # no wait of ours is longer
SECRET_WORDS = ("secret", "password", "token_file", "api_key", "salt")
S = TypeVar("S", bound=msgspec.Struct)


def load(
    kind: type[S], argv: Sequence[str], environ: Mapping[str, str] | None = None, *, prog: str = "moonrelay"
) -> S:
    """Compose `kind` from the three sources; a bad value's error names its source, field and expected type.

    Raises: SettingsError. `--help` and unknown flags leave through argparse (exit 0 and 2).
    """
    environ = os.environ if environ is None else environ
    parser = argparse.ArgumentParser(prog=prog, description=(kind.__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--config", default=environ.get("MOONRELAY_CONFIG"), help="TOML file with these names")
    fields = {f.name: f for f in msgspec.structs.fields(kind)}
    hints = typing.get_type_hints(kind)
    for name, field in fields.items():
        flag = "--" + name.replace("_", "-")
        shown = "required" if field.required else f"default: {_default(field)!r}"
        if choices := _choices(hints[name]):
            shown += f"; one of {', '.join(choices)}"
        if _base_type(hints[name]) is bool:
            parser.add_argument(flag, dest=name, default=None, action=argparse.BooleanOptionalAction, help=shown)
        else:
            parser.add_argument(flag, dest=name, default=None, help=shown)
    flags = vars(parser.parse_args(list(argv)))
    merged: dict[str, Any] = {}
    if flags.pop("config"):
        merged.update(_read_file(Path(parser.parse_args(list(argv)).config), fields))
    for name in fields:
        value = environ.get(ENV_PREFIX + name.upper())
        if value is not None and ENV_PREFIX + name.upper() not in NOT_SETTINGS:
            merged[name] = _convert(value, hints[name], f"environment {ENV_PREFIX}{name.upper()}")
    for unknown in _unknown(environ, fields):
        print(f"{prog}: environment {unknown}: no setting has this name, ignored", file=sys.stderr, flush=True)
    for name, value in flags.items():
        if value is not None:
            merged[name] = _convert(value, hints[name], "--" + name.replace("_", "-"))
    for name, field in fields.items():
        if name not in merged and field.required:
            flag, variable = "--" + name.replace("_", "-"), ENV_PREFIX + name.upper()
            raise SettingsError(f"{name}: expected {flag}, {variable} or a line in a settings file, found none")
    try:
        return msgspec.convert(merged, kind)
    except msgspec.ValidationError as error:
        raise SettingsError(str(error)) from None


def check_range(settings: msgspec.Struct, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Every named field lies within its bounds, both included. Raises: SettingsError."""
    for name, (low, high) in bounds.items():
        if not low <= getattr(settings, name) <= high:
            raise SettingsError(f"{name}: expected {low} to {high}, found {getattr(settings, name)}")


def _unknown(environ: Mapping[str, str], fields: Mapping[str, Any]) -> list[str]:
    """Names that look like settings and are none of any role."""
    known = NOT_SETTINGS | {ENV_PREFIX + name.upper() for name in ALL_NAMES | fields.keys()}
    return sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)


def redacted(settings: msgspec.Struct) -> dict[str, Any]:
    """What may be printed: secrets become ***, and a URL loses its password."""
    shown = {}
    for name, value in msgspec.structs.asdict(settings).items():
        if any(word in name for word in SECRET_WORDS) and value:
            value = "***"
        elif isinstance(value, str) and "://" in value and "@" in value:
            scheme, rest = value.split("://", 1)
            value = f"{scheme}://***@{rest.rsplit('@', 1)[1]}"
        shown[name] = value
    return shown


def _read_file(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"settings file {path} is not TOML: {error}") from None
    unknown = sorted(found.keys() - fields.keys())
    if unknown:
        raise SettingsError(f"settings file {path}: unknown {', '.join(unknown)}; known are {', '.join(fields)}")
    return found


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    assert field.default_factory is not msgspec.NODEFAULT
    return field.default_factory()


def _base_type(hint: Any) -> Any:
    """`int | None` counts as `int`: None is only ever the default."""
    if isinstance(hint, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _choices(hint: Any) -> tuple[str, ...]:
    """Of a Literal; else none."""
    base = _base_type(hint)
    return typing.get_args(base) if typing.get_origin(base) is typing.Literal else ()


def _convert(value: Any, hint: Any, source: str) -> Any:
    base, choices = _base_type(hint), _choices(hint)
    if isinstance(value, bool):
        return value
    if choices and value not in choices:
        raise SettingsError(f"{source}: expected one of {', '.join(choices)}, found {value!r}")
    try:
        if base is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[value.lower()]
        if base in (int, float):
            return base(value.replace("_", ""))
        if typing.get_origin(base) in (tuple, list):
            return [part for part in value.split(",") if part]
    except (ValueError, KeyError):
        raise SettingsError(f"{source}: expected {base.__name__}, found {value!r}") from None
    return value
