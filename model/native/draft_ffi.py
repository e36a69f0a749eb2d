"""The drafter's share of the C interface, typed. Field order and enumerations mirror `drafter.h`."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

_INTS = (
    "vocab", "hidden", "inter", "layers", "heads", "taps", "q_lora", "kv_lora", "nope", "rope", "v_dim",
    "markov_rank", "confidence", "confidence_markov", "mask_id", "exact",
)  # fmt: skip
_FLOATS = ("eps", "embedding_scale", "score_scale", "amplitude")


class DraftShape(ctypes.Structure):
    """`DraftConfig` in drafter.h."""

    _fields_ = [
        *((name, c_int32) for name in _INTS),
        *((name, c_float) for name in _FLOATS),
        ("mla_width", c_int64),
    ]


class DraftPool(ctypes.Structure):
    _fields_ = (("rows", c_void_p), ("num_blocks", c_int64), ("block_floats", c_int64), ("block_tokens", c_int32))


class DraftRows(ctypes.Structure):
    _fields_ = (
        ("num_segments", c_int32),
        ("tokens", c_void_p),
        ("start", c_void_p),
        ("blocks", c_void_p),
        ("num_blocks", c_void_p),
        ("pool", DraftPool),
        ("taps", c_void_p),
    )


class DraftPass(ctypes.Structure):
    _fields_ = (
        ("num_requests", c_int32),
        ("anchor", c_void_p),
        ("position", c_void_p),
        ("first", c_void_p),
        ("length", c_void_p),
        ("temperature", c_void_p),
        ("uniforms", c_void_p),
        ("guess", c_void_p),
        ("more", c_void_p),
        ("blocks", c_void_p),
        ("num_blocks", c_void_p),
        ("pool", DraftPool),
        ("tokens", c_void_p),
        ("confidence", c_void_p),
        ("laws", c_void_p),
        ("good", c_void_p),
    )


class DraftMatrix(IntEnum):
    CONTEXT, HEAD, MARKOV_OUT, Q_A, Q_B, ROWS, KEY_UP, VALUE_UP, OUT, MLP_IN, MLP_OUT = range(11)


class DraftVector(IntEnum):
    (
        CONTEXT_NORM, FINAL_NORM, MARKOV_IN, CONFIDENCE, CONFIDENCE_BIAS, FREQUENCY, IN_NORM, POST_NORM, QA_NORM,
        ROW_NORM,
    ) = range(10)  # fmt: skip


SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "mr_draft_create": (c_void_p, [POINTER(DraftShape), c_int32]),
    "mr_draft_destroy": (None, [c_void_p]),
    "mr_draft_pack": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int32, c_int32]),
    "mr_draft_round": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int32, c_int32]),
    "mr_draft_vector": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int64]),
    "mr_draft_embedding": (None, [c_void_p, c_void_p, c_int32]),
    "mr_draft_check": (c_int32, [c_void_p]),
    "mr_draft_write": (c_int32, [c_void_p, POINTER(DraftRows)]),
    "mr_draft_propose": (c_int32, [c_void_p, POINTER(DraftPass), c_int32]),
}
