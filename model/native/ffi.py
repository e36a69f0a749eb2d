"""The C interface of `api.cpp`, typed. Field order and enumerations mirror `network.h` and `matrix.h`."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path

from model.errors import BackendUnavailable
from model.native.draft_ffi import SIGNATURES as DRAFT_SIGNATURES
from model.native.draw_ffi import SIGNATURES as DRAW_SIGNATURES

_INTS = (
    "vocab", "hidden", "num_layers", "heads", "q_lora", "kv_lora", "nope", "rope", "v_dim", "mla_gate", "kda_heads",
    "key_dim", "value_dim", "conv_kernel", "gate_rank", "full_rank_gate", "bounded_gate", "dense_inter", "experts",
    "top_k", "shared_inter", "expert_inter", "latent", "renormalize", "res_block", "situ",
)  # fmt: skip
_FLOATS = ("eps", "lora_eps", "l2_eps", "gate_bound", "beta", "linear_beta", "routed_scale")


class NetworkShape(ctypes.Structure):
    """`Config` in network.h."""

    _fields_ = [*((name, c_int32) for name in _INTS), *((name, c_float) for name in _FLOATS)]


class Source(ctypes.Structure):
    """One stored tensor or a part of it; element (r, c) is at r*row_stride + c*col_stride elements."""

    _fields_ = (
        ("data", c_void_p),
        ("scale", c_void_p),
        ("kind", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("row_stride", c_int64),
        ("col_stride", c_int64),
    )


class Pass(ctypes.Structure):
    """`facts` are six numbers a segment: tokens, start, slot, logits, record (-1: none), blocks; `numbers` all
    segments' ids, then all their block tables. Or five a fold: record, slot, first, tokens, start."""

    _fields_ = (
        ("num_segments", c_int32),
        ("facts", c_void_p),
        ("numbers", c_void_p),
        ("rows", c_void_p),
        ("pool_blocks", c_int64),
        ("block_floats", c_int64),
        ("state", c_void_p),
        ("pool_slots", c_int64),
        ("slot_floats", c_int64),
        ("block_tokens", c_int32),
        ("out", c_void_p),
        ("progress", c_void_p),
        ("records", c_void_p),
        ("num_records", c_int64),
        ("record_floats", c_int64),
        ("record_tokens", c_int32),
        ("taps", c_void_p),
    )


class Kind(IntEnum):
    F32, BF16, MX = range(3)


class Join(IntEnum):
    ROWS, COLUMNS, GLU = range(3)


class Finish(IntEnum):
    STORE, ADD, GATE, GLU = range(4)


class MathFunction(IntEnum):
    EXP, SIGMOID, TANH, SOFTPLUS = range(4)


class Clock(IntEnum):
    OFF, WALL, CPU = range(3)


class MatrixSlot(IntEnum):
    (
        ATTN_IN, DECAY, GATE_B, ATTN_OUT, Q_B, KEY_UP, VALUE_UP, DENSE_IN, DENSE_OUT, FFN_IN, SHARED_IN, FFN_OUT,
        EXPERT_IN, EXPERT_OUT, HEAD,
    ) = range(15)  # fmt: skip


class VectorSlot(IntEnum):
    (
        IN_NORM, POST_NORM, ATTN_RES, FFN_RES, CONV_Q, CONV_K, CONV_V, DECAY_RATE, DECAY_BIAS, OUT_NORM, QA_NORM,
        KV_NORM, ROUTER_BIAS, ROUTED_NORM, FINAL_NORM, FINAL_RES,
    ) = range(16)  # fmt: skip


class Op(IntEnum):
    (
        EMBED, MIX, ATTN_IN, KDA_GATES, KDA, MLA_STORE, MLA_QUERY, MLA_ATTEND, MLA_VALUE, ATTN_OUT, FFN_IN, ROUTE,
        EXPERT_IN, EXPERT_OUT, COMBINE, FFN_OUT, LOGITS,
    ) = range(17)  # fmt: skip


LOGITS_MODES = {"none": 0, "last": 1, "all": 2}
ALL_LOGITS = LOGITS_MODES["all"]

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "mr_error": (c_char_p, []),
    "mr_isa": (c_char_p, []),
    "mr_create": (c_void_p, [POINTER(NetworkShape), c_char_p, c_int32]),
    "mr_destroy": (None, [c_void_p]),
    "mr_pack": (c_int32, [c_void_p, c_int32, c_int32, POINTER(Source), c_int32, c_int32]),
    "mr_vector": (c_int32, [c_void_p, c_int32, c_int32, c_void_p, c_int64]),
    "mr_embedding": (None, [c_void_p, c_void_p, c_int32]),
    "mr_check": (c_int32, [c_void_p]),
    "mr_forward": (c_int32, [c_void_p, POINTER(Pass)]),
    "mr_taps": (c_int32, [c_void_p, c_void_p, c_int32]),
    "mr_rouse": (None, [c_void_p]),
    "mr_share_from": (None, [c_void_p, c_double]),
    "mr_widen_up_to": (None, [c_void_p, c_double]),
    "mr_cached_up_to": (None, [c_void_p, c_double]),
    "mr_record_floats": (c_int64, [c_void_p, c_int32]),
    "mr_fold": (c_int32, [c_void_p, POINTER(Pass)]),
    "mr_profile": (None, [c_void_p, c_int32, POINTER(c_double)]),
    "mr_weight_bytes": (c_int64, [c_void_p]),
    "mr_op_gemm": (
        c_int32,
        [
            POINTER(Source),
            c_int32,
            c_int32,
            c_void_p,
            c_int32,
            c_void_p,
            c_int64,
            c_int32,
            c_void_p,
            c_int64,
            c_void_p,
            c_int32,
        ],
    ),
    "mr_op_unpack": (c_int32, [POINTER(Source), c_int32, c_int32, c_void_p, POINTER(c_int32)]),
    "mr_op_math": (None, [c_int32, c_void_p, c_void_p, c_int64]),
    "mr_op_ceiling": (None, [POINTER(c_double), POINTER(c_double)]),
    "mr_op_kda": (c_int32, [c_int32, c_int32, c_int32, *[c_void_p] * 7]),
    **DRAFT_SIGNATURES,
    **DRAW_SIGNATURES,
}


def load(path: Path) -> ctypes.CDLL:
    """Bind a built library. Raises BackendUnavailable if it cannot be loaded here."""
    try:
        lib = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(f"{path} cannot be loaded: {error}") from error
    return lib
