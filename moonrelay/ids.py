"""Identifier types: plain strings and bytes at run time, distinct to the type checker."""

from __future__ import annotations

from typing import Literal, NewType

PrefixHash = NewType("PrefixHash", bytes)  # 16 bytes
RequestId = NewType("RequestId", str)
InstanceId = NewType("InstanceId", str)
Role = Literal["router", "prefill", "decode", "aggregated", "cachestore"]
ROLES: tuple[Role, ...] = ("router", "prefill", "decode", "aggregated", "cachestore")
