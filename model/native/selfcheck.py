"""A library is trusted after it has computed a small network to the recorded bits.

The arithmetic is the same on every machine (fixed order, explicit fused operations, sums over 16 lanes whatever the
registers), so one digest holds for all of them: a miscompilation, or vectors that nobody has run yet, is found here
and not in somebody's answer.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from model.batch import Backend, Segment
from model.checkpoint import PackedTensor
from model.config import ModelConfig
from model.tensors import expected_tensors, expert_name

DIGEST = "9387a60d22997d4003bc87299435e42c"

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
