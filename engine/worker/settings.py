"""Settings that both workers have; each role's struct adds its own."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.settings import DraftRule, EngineSettings
from engine.worker.timing import Timing
from model.ops.snapshot import SnapshotDtype
from moonrelay.settings import DAY_MS, check_range

BOUNDS = {
    "threads": (0, 1_024),
    "device_share": (0, 1),
    "admission_wait_ms": (0, DAY_MS),
    "publish_inflight_max": (0, 4_096),
    "handoff_timeout_ms": (1, DAY_MS),
    "transfer_min_bytes_per_s": (1, 1 << 50),
    "handoff_lease_ms": (1, DAY_MS),
    "drain_timeout_ms": (0, DAY_MS),
}


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings shared by the prefill and decode workers."""

    model_dir: str
    redis_url: str
    cluster: str = "local"
    instance_id: str | None = None  # None: role, host name and pid; a restarted role should keep its id
    model_name: str | None = None  # the name that requests use; None: the checkpoint directory's
    listen: str = "127.0.0.1:0"
    advertise_host: str | None = None  # what peers dial; None: the host of `listen`
    metrics_listen: str = "127.0.0.1:0"
    ready_file: str | None = None
    transport: Literal["auto", "nixl", "tcp"] = "auto"
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    backend: Literal["auto", "native", "torch"] = "auto"
    numerics: Literal["invariant", "fast"] = "invariant"
    # auto: the checkpoint's own, in its folder `drafter`, where there is one; off; or a drafter's directory. Prefill
    # and decode must have the same: prefill writes the drafter's rows, decode drafts from them.
    drafter: str = "auto"
    threads: int = 0  # 0: two, where there are two cores

    block_tokens: int = 64
    num_blocks: int = 4096
    num_slots: int = 64  # sequences and snapshots together
    max_batch_tokens: int = 512
    prefill_share_tokens: int = 128
    max_batch_sequences: int = 32
    queue_len_max: int = 256  # waiting for memory, and again for a place in the batch
    device_share: float = (
        0.5  # of the pools: what finished prompts and turns may keep until somebody needs it; 0: off
    )
    writeback: Literal["on", "off", "adaptive"] = "adaptive"  # see EngineSettings
    draft_len_max: int = 0  # tokens drafted for one step of a sequence; 0: none, though a drafter's rows are written
    draft_read_len_max: int = 0  # the same for drafts read from the text, where that is more than draft_len_max
    draft_rule: DraftRule = "block"
    draft_adaptive: bool = True  # draft only what pays; off: always draft_len_max
    snapshot_dtype: SnapshotDtype = "fp32"  # how snapshots are stored; what each costs in precision: engine/DESIGN.md
    admission_wait_ms: int = 30_000  # the longest a prompt waits for memory

    cache: bool = True  # fetch from and publish to the cache nodes
    publish_inflight_max: int = 4  # more are skipped and counted: storing is never in a request's way
    handoff_timeout_ms: int = 2_000  # floor of a transfer's deadline, which grows with the bytes
    transfer_min_bytes_per_s: int = 50_000_000  # slower than this is a broken link
    handoff_lease_ms: int = 6_000  # floor of the time that memory is lent
    drain_timeout_ms: int = 8_000  # after SIGTERM

    def __post_init__(self) -> None:
        check_range(self, BOUNDS)
        self.timing()
        self.engine()

    def timing(self) -> Timing:
        return Timing(
            transfer_floor_ms=self.handoff_timeout_ms,
            transfer_min_bytes_per_s=self.transfer_min_bytes_per_s,
            lease_floor_ms=self.handoff_lease_ms,
        )

    def engine(self) -> EngineSettings:
        return EngineSettings(**{name: getattr(self, name) for name in EngineSettings.__struct_fields__})
