"""A cache node's settings."""

from __future__ import annotations

from typing import Literal

import msgspec

from moonrelay.errors import SettingsError
from moonrelay.settings import DAY_MS, check_range

DRAM_BYTES_MIN = 1 << 20
DISK_BYTES_MIN = 1 << 20
BYTES_MAX = 1 << 60
BOUNDS = {
    "dram_bytes": (DRAM_BYTES_MIN, BYTES_MAX),
    "disk_bytes": (0, BYTES_MAX),
    "replicate_after": (0, 1 << 30),
    "pull_timeout_ms": (1, DAY_MS),
    "longest_transfer_ms": (1, DAY_MS),
}


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cache node: blocks and snapshots in memory and, with --disk-dir and --disk-bytes, in files."""

    redis_url: str
    cluster: str = "local"
    instance_id: str | None = None  # None: role, host name and pid; a restarted node should keep its id
    listen: str = "127.0.0.1:0"
    advertise_host: str | None = None  # what peers dial; None: the host of `listen`
    metrics_listen: str = "127.0.0.1:0"
    ready_file: str | None = None
    transport: Literal["auto", "nixl", "tcp"] = "auto"
    dram_bytes: int = 512 << 20  # address space; a page costs memory once it is used
    disk_dir: str | None = None  # a new, an empty or an earlier node's directory; None: no disk tier
    disk_bytes: int = 0  # how much the files may take
    replicate_after: int = 32  # leases of a bundle within a minute that give it to another node too; 0: never
    pull_timeout_ms: int = 10_000  # the longest a publish may take
    longest_transfer_ms: int = 2_000  # how long a read may go on after its lease expired
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    def __post_init__(self) -> None:
        if self.disk_dir is None and self.disk_bytes:
            raise SettingsError(f"disk_dir: expected a directory for disk_bytes {self.disk_bytes}, found none")
        if self.disk_dir is not None and self.disk_bytes < DISK_BYTES_MIN:
            raise SettingsError(f"disk_bytes: expected at least {DISK_BYTES_MIN}, found {self.disk_bytes}")
        check_range(self, BOUNDS)
        for name in ("listen", "metrics_listen"):
            host, colon, port = getattr(self, name).rpartition(":")
            if not host or not colon or not port.isdigit() or int(port) > 65_535:
                raise SettingsError(f"{name}: expected HOST:PORT, found {getattr(self, name)!r}")
