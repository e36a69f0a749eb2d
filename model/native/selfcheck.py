"""A library is trusted after it has computed a small network to the recorded bits.

The arithmetic is the same on every machine (fixed order, explicit fused operations, sums over 16 lanes whatever the
registers), so one digest holds for all of them: a miscompilation, or vectors that nobody has run yet, is found here
and not in somebody's answer.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from model.batch import Backend, Segment
from model.checkpoint import PackedTensor
from model.config import ModelConfig
from model.native.draw_ffi import WANTED
from model.native.sampler import NativeSampler
from model.tensors import expected_tensors, expert_name

DIGEST = "9387a60d22997d4003bc87299435e42c"
DRAWS = "ef0195be845610ce7b94fb61b1d91c74"  # the same of what is drawn

# Small and odd: every width leaves a tail in 16 lanes, all weight kinds occur, blocks are shorter than a tile.
CONFIG = ModelConfig(
    family="kimi_k3", dtype="bfloat16", vocab_size=37, hidden_size=43, num_layers=4, context_len=256, bos_token_id=0,
    eos_token_id=1, pad_token_id=2, media_token_id=None, rms_norm_eps=1e-5, lora_norm_eps=1e-6, qk_l2_eps=1e-6,
    mla_layers=(2, 3), num_heads=3, q_lora_rank=18, kv_lora_rank=21, qk_nope_dim=13, qk_rope_dim=5, v_dim=11,
    mla_output_gate=True, kda_layers=(0, 1), kda_heads=2, kda_head_dim=27, conv_kernel=4, gate_lower_bound=-5.0,
    kda_full_rank_gate=True, activation="situ", situ_beta=4.0, situ_linear_beta=25.0, dense_layers=1,
    intermediate_size=29, num_experts=4, experts_per_token=2, num_shared_experts=1, expert_intermediate_size=32,
    latent_size=32, renormalize=True, routed_scaling_factor=1.0, attn_res_block_size=2, mxfp4_group=32,
)  # fmt: skip
TOKENS, CUT, BLOCK_TOKENS = 90, 67, 16


class PatternWeights:
    """Weights from integer arithmetic alone, the same on every machine and library version."""

    def __init__(self) -> None:
        self._specs = expected_tensors(CONFIG, experts_packed=False)

    def __getitem__(self, name: str) -> torch.Tensor:
        spec = self._specs[name]
        values = _pattern(name, int(np.prod(spec.shape))).astype(np.float32) / 128 - 1  # multiples of 1/128: exact
        if len(spec.shape) == 1:
            values = 1 + values / 4
        dtype = torch.bfloat16 if "BF16" in spec.dtypes else torch.float32
        return torch.from_numpy(values.reshape(spec.shape)).to(dtype)

    def expert(self, layer: int, index: int, matrix: str) -> PackedTensor:
        name = f"{expert_name(layer, index, matrix)}.weight"
        rows, cols = self._specs[name].shape
        packed = _pattern(name, rows * cols // 2).astype(np.uint8).reshape(rows, -1)
        scale = (120 + _pattern(name + "scale", rows * cols // 32) % 6).astype(np.uint8).reshape(rows, -1)
        return PackedTensor(torch.from_numpy(packed), torch.from_numpy(scale))


def _pattern(name: str, count: int) -> np.ndarray:
    """`count` integers in 0..255."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    words = (np.arange(count, dtype=np.uint64) + np.uint64(seed)) * np.uint64(2654435761)
    return (words >> np.uint64(13)) % np.uint64(256)


def digest(backend: Backend) -> str:
    """Of the logits, rows and state that a prompt in two chunks leaves beside a second sequence."""
    layout = backend.layout(BLOCK_TOKENS)
    rows, state = torch.zeros(12, layout.block_floats), torch.zeros(2, layout.slot_floats)
    ids = [int(i) % CONFIG.vocab_size for i in _pattern("ids", TOKENS)]
    blocks = [7, 2, 9, 4, 11, 0]
    passes = [
        [
            Segment(ids=ids[:CUT], start=0, slot=1, blocks=blocks, logits="all"),
            Segment(ids=ids[3:8], start=0, slot=0, blocks=[5], logits="last"),
        ],
        [Segment(ids=ids[CUT:], start=CUT, slot=1, blocks=blocks, logits="all")],
    ]
    logits = [backend.forward(segments, rows, state) for segments in passes]
    result = hashlib.blake2b(digest_size=16)
    for tensor in (*logits, rows, state):
        result.update((tensor + 0.0).numpy().tobytes())  # + 0: the sign of zero is no result
    return result.hexdigest()


class Params(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 7
    choice: int = 0


class Wanted(NamedTuple):
    params: Params
    position: int
    drafted: Sequence[int] = ()
    laws: np.ndarray | None = None


LAWS = (
    Params(0.0),
    Params(),
    Params(0.7),
    Params(1.3, top_k=40),
    Params(0.9, top_p=0.8),
    Params(3.0, top_k=200, top_p=0.5),
)
RULES: tuple[Literal["standard", "block"], ...] = ("standard", "block")
DRAFTED, DRAWN_FROM = 5, 1037  # an id or two more than whole blocks, with a tail in 16 lanes


def draws_digest(lib: ctypes.CDLL) -> str:
    """Of laws, of tokens drawn from them, and of verdicts on drafts under both rules."""
    result = hashlib.blake2b(digest_size=16)
    shape = DRAFTED + 1, DRAWN_FROM
    pattern = _pattern("logits", shape[0] * shape[1]).reshape(shape)
    logits = (pattern.astype(np.float32) - np.float32(128)) / np.float32(16)
    noise = (_pattern("laws", DRAFTED * DRAWN_FROM) % 3).astype(np.int32).reshape(DRAFTED, -1)
    near = np.rint(logits[:-1] * 1.4).astype(np.int32) + noise
    powers = np.ldexp(1.0, near)  # exact, and so is their sum
    laws = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
    likely = (-laws).argsort(axis=1, kind="stable")
    weights = np.empty(DRAWN_FROM, dtype=np.float32)
    sampler = NativeSampler(lib)
    for p in LAWS:
        asked = WANTED.pack(logits.ctypes.data, 0, 0, 0, p.top_p, p.temperature, 0, p.top_k, 0)
        lib.mr_op_weigh(asked, DRAWN_FROM, weights.ctypes.data)
        result.update(weights.tobytes())
        plain = [Wanted(p, position) for position in range(len(logits))]
        result.update(bytes(sampler.draw(logits, plain, {}, "block")))
        for rule in RULES:
            for position in range(40):
                drafted = [int(likely[slot, 3 * slot * (position % 5)]) for slot in range(DRAFTED)]
                result.update(bytes(sampler.draw(logits, [Wanted(p, position, drafted, laws)], {}, rule)))
    return result.hexdigest()
