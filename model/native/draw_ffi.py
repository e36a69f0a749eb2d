"""Drawing's share of the C interface, typed. `WANTED` mirrors `Wanted` in draw.h, field by field."""

from __future__ import annotations

import struct
from ctypes import c_double, c_int32, c_uint32, c_uint64, c_void_p
from enum import IntEnum

# logits, laws: addresses; seed, position; top_p, temperature; choice, top_k, num_drafted
WANTED = struct.Struct("@QQQQddIii4x")
NOT_FINITE = -1


class Rule(IntEnum):
    STANDARD, BLOCK = range(2)


SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "mr_draw": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int32, c_void_p]),
    "mr_op_weigh": (c_int32, [c_void_p, c_int32, c_void_p]),
    "mr_op_uniform": (c_double, [c_uint64, c_uint32, c_uint64, c_uint32, c_uint32]),
}
