"""Stored forms of a state snapshot: fp32 as it is, bf16, or fp8 with a scale per head."""

from __future__ import annotations

from typing import Final, Literal

SnapshotDtype = Literal["fp32", "bf16", "fp8"]
# As fingerprints and manifests say it. fp8: recurrent state e4m3 times a scale per head, conv history bf16.
DTYPE_NAMES: Final[dict[SnapshotDtype, str]] = {"fp32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3_per_head"}
E4M3_MAX: Final = 448.0
