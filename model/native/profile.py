"""Where a pass's time goes, against the machine's ceilings: `python -m model.native.profile MODEL_DIR|nano|k3_180m`.

The two names stand for random weights of those shapes. Every figure is the best of many passes, operation by
operation, because a shared machine only ever makes them slower; on one thread it is CPU time, for the same reason.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path

import torch

from model.batch import Segment
from model.checkpoint import PackedTensor, load_weights
from model.config import ModelConfig, load_config
from model.native.backend import NativeBackend, library
from model.native.ffi import Clock
from model.native.loader import WeightSource
from model.tensors import expected_tensors, expert_name

BLOCK_TOKENS = 64
CONTEXT = 512  # tokens before the measured decode steps
COMMON = {
    "family": "kimi_k3", "dtype": "bfloat16", "context_len": 131072, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2, "media_token_id": None, "rms_norm_eps": 1e-5, "lora_norm_eps": 1e-6, "qk_l2_eps": 1e-6,
    "mla_output_gate": True, "conv_kernel": 4, "gate_lower_bound": -5.0, "kda_full_rank_gate": True,
    "activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0, "dense_layers": 1, "renormalize": True,
    "routed_scaling_factor": 1.0,
}  # fmt: skip
SHAPES = {
    "nano": {
        "vocab_size": 6400, "hidden_size": 256, "num_layers": 9, "mla_layers": (3, 7, 8), "num_heads": 4,
        "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_dim": 64, "qk_rope_dim": 32, "v_dim": 64,
        "kda_layers": (0, 1, 2, 4, 5, 6), "kda_heads": 4, "kda_head_dim": 64, "intermediate_size": 512,
        "num_experts": 16, "experts_per_token": 2, "num_shared_experts": 2, "expert_intermediate_size": 96,
        "latent_size": 128, "attn_res_block_size": 3, "mxfp4_group": 32,
    },
    "k3_180m": {
        "vocab_size": 49152, "hidden_size": 768, "num_layers": 12, "mla_layers": (3, 7, 11), "num_heads": 6,
        "q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_dim": 128, "qk_rope_dim": 64, "v_dim": 128,
        "kda_layers": (0, 1, 2, 4, 5, 6, 8, 9, 10), "kda_heads": 6, "kda_head_dim": 128, "intermediate_size": 2048,
        "num_experts": 16, "experts_per_token": 4, "num_shared_experts": 1, "expert_intermediate_size": 448,
        "latent_size": 384, "attn_res_block_size": 4, "mxfp4_group": None,
    },
}  # fmt: skip


class RandomWeights:
    """Weights of a shape, drawn on demand; MXFP4 experts where the config has a group."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._specs = expected_tensors(config, experts_packed=False)
        self._random = torch.Generator().manual_seed(0)

    def __getitem__(self, name: str) -> torch.Tensor:
        spec = self._specs[name]
        dtype = torch.bfloat16 if spec.dtypes == ("BF16",) else torch.float32
        if len(spec.shape) == 1:
            return torch.ones(spec.shape, dtype=dtype)
        values: torch.Tensor = torch.randn(spec.shape, generator=self._random) / spec.shape[-1] ** 0.5
        return values.to(dtype)

    def expert(self, layer: int, index: int, matrix: str) -> torch.Tensor | PackedTensor:
        name = f"{expert_name(layer, index, matrix)}.weight"
        if self.config.mxfp4_group is None:
            return self[name]
        rows, cols = self._specs[name].shape
        packed = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, generator=self._random)
        return PackedTensor(packed, torch.full((rows, cols // 32), 122, dtype=torch.uint8))


class Bench:
    """One backend and pools for `batch` sequences of up to `tokens` tokens."""

    def __init__(self, backend: NativeBackend, batch: int, tokens: int, clock: Clock) -> None:
        self.backend, self.batch, self.clock = backend, batch, clock
        self.seconds = time.thread_time if clock is Clock.CPU else time.perf_counter
        layout = backend.layout(BLOCK_TOKENS)
        per = -(-tokens // BLOCK_TOKENS)
        self.rows = torch.zeros(batch * per, layout.block_floats)
        self.state = torch.zeros(batch, layout.slot_floats)
        self.tables = [range(i * per, (i + 1) * per) for i in range(batch)]

    def run(self, tokens: int, start: int) -> float:
        """Seconds of one pass: every sequence's next `tokens` tokens."""
        ids = [(7 * start + 13 * i) % self.backend.config.vocab_size for i in range(tokens)]
        segments = [Segment(ids=ids, start=start, slot=i, blocks=table) for i, table in enumerate(self.tables)]
        begin = self.seconds()
        self.backend.forward(segments, self.rows, self.state)
        return self.seconds() - begin

    def best(self, tokens: int, start: int, passes: int) -> tuple[float, dict[str, float]]:
        """The best pass, and each operation's best, over passes that start anew at `start`."""
        self.backend.profile(Clock.OFF)
        total = min(self.run(tokens, start) for _ in range(passes))
        parts = dict.fromkeys(self.backend.profile(self.clock), float("inf"))
        for _ in range(passes):
            self.run(tokens, start)
            parts = {name: min(parts[name], spent) for name, spent in self.backend.profile(self.clock).items()}
        return total, parts


def report(title: str, tokens: int, wall: float, parts: dict[str, float]) -> None:
    print(f"{title}: {wall * 1e3:.3f} ms, {tokens / wall:.0f} tokens/s")
    total = sum(parts.values())
    for name, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        if seconds > 0.005 * total:
            print(f"    {name:<12} {seconds * 1e6:10.1f} us  {100 * seconds / total:5.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help=f"a model directory, or one of {', '.join(SHAPES)}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--passes", type=int, default=50)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 4, 8])
    options = parser.parse_args()
    gflops, gbytes = ctypes.c_double(), ctypes.c_double()
    library().mr_op_ceiling(gflops, gbytes)
    print(f"one thread's ceiling: {gflops.value:.0f} GFLOP/s fp32, {gbytes.value:.1f} GB/s read")
    if options.model in SHAPES:
        config = ModelConfig(**COMMON, **SHAPES[options.model])  # type: ignore[arg-type]
        weights: WeightSource = RandomWeights(config)
    else:
        config = load_config(Path(options.model))
        weights = load_weights(Path(options.model), config)
    begin = time.perf_counter()
    backend = NativeBackend(config, weights, options.threads)
    print(f"loaded in {time.perf_counter() - begin:.2f} s: {backend.weight_bytes / 1e6:.0f} MB packed, {backend.isa}")
    clock = Clock.CPU if options.threads == 1 else Clock.WALL
    for batch in options.decode:
        bench = Bench(backend, batch, CONTEXT + 1, clock)
        bench.run(CONTEXT, 0)
        report(f"decode, {batch} sequences after {CONTEXT} tokens", batch, *bench.best(1, CONTEXT, options.passes))
    for tokens in options.prefill:
        bench = Bench(backend, 1, tokens, clock)
        report(f"prefill of {tokens} tokens", tokens, *bench.best(tokens, 0, max(2, options.passes // 10)))


if __name__ == "__main__":
    main()
