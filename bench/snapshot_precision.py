"""`make bench-precision`: what a snapshot's stored form does to the logits after a hit, on k3-nano and real text.

Every text is computed once as it is; at each boundary its state is stored and restored in each form, and the rest is
computed again from there over the same rows. Reported by the distance of a token from the hit: the relative L2 error
of its logits, the largest absolute one, how often the most likely token changes, and how often it does where the
exact run's two best are further apart than 0.1. Writes bench/results/snapshot-precision.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.pools import Pools
from engine.settings import EngineSettings
from model.backend import load_backend
from model.batch import Backend, PoolLayout, Segment
from model.ops.snapshot import SnapshotDtype, packed
from model.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "bench" / "results" / "snapshot-precision.json"
MODEL = ROOT / "model" / "zoo" / "k3_nano"
BLOCK = 64
TEXTS = (
    "argparse.py", "json/decoder.py", "textwrap.py", "heapq.py", "http/client.py", "statistics.py", "csv.py",
    "tarfile.py", "email/message.py", "asyncio/queues.py",
)  # fmt: skip
DOCUMENTS = ("README.md", "router/DESIGN.md", "cachestore/DESIGN.md", "model/zoo/k3_nano/README.md")
PROMPT_TOKENS = 2_048
BOUNDARIES = (256, 768, 1_280)
REST = 256  # tokens computed after a hit
DISTANCES = ((0, 1), (1, 16), (16, 64), (64, 256))
CLEAR_MARGIN = 0.1


@dataclass
class Tally:
    """Over the positions of one range of distances."""

    relative: list[float] = field(default_factory=list)
    largest: float = 0.0
    flips: int = 0
    clear: int = 0
    clear_flips: int = 0

    def add(self, exact: torch.Tensor, got: torch.Tensor) -> None:
        """Shapes: both [positions, vocab]."""
        self.relative += ((got - exact).norm(dim=1) / exact.norm(dim=1)).tolist()
        self.largest = max(self.largest, float((got - exact).abs().max()))
        best = exact.topk(2, dim=1).values
        clear = best[:, 0] - best[:, 1] > CLEAR_MARGIN
        flipped = exact.argmax(dim=1) != got.argmax(dim=1)
        self.flips += int(flipped.sum())
        self.clear += int(clear.sum())
        self.clear_flips += int((flipped & clear).sum())

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.relative)
        return {
            "positions": len(ordered),
            "relative_l2_median": ordered[len(ordered) // 2],
            "relative_l2_p99": ordered[len(ordered) * 99 // 100],
            "largest_absolute": self.largest,
            "top1_flips": self.flips,
            "clear_positions": self.clear,
            "clear_top1_flips": self.clear_flips,
        }


def texts() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    yield from ((library / name).read_text() for name in TEXTS)
    yield from ((ROOT / name).read_text() for name in DOCUMENTS)


class Run:
    """One text's rows and state; slot 0 computes, slot 1 holds the exact state at the boundary."""

    def __init__(self, backend: Backend, ids: list[int]) -> None:
        self.backend, self.ids = backend, ids
        self.layout: PoolLayout = backend.layout(BLOCK)
        settings = EngineSettings(num_blocks=len(ids) // BLOCK + 2, num_slots=2, max_batch_sequences=1)
        self.pools = Pools(self.layout, settings)
        self.blocks = range(settings.num_blocks)

    def consume(self, start: int, end: int, *, wanted: bool) -> torch.Tensor:
        segment = Segment(
            ids=self.ids[start:end], start=start, slot=0, blocks=self.blocks, logits="all" if wanted else "none"
        )
        return self.backend.forward([segment], self.pools.rows, self.pools.state)

    def measure(self, boundary: int, rest: int, tallies: dict[SnapshotDtype, list[Tally]]) -> None:
        """From a state at `boundary`: the exact continuation, and that of each form."""
        self.pools.copy_state(0, 1)
        exact = self.consume(boundary, boundary + rest, wanted=True).clone()
        for dtype, distances in tallies.items():
            self.pools.copy_state(1, 0)
            packed.encode(self.pools.state[0], self.layout, dtype)
            packed.decode(self.pools.state[0], self.layout, dtype)
            got = self.consume(boundary, boundary + rest, wanted=True)
            for (first, end), tally in zip(DISTANCES, distances, strict=True):
                if first < rest:
                    tally.add(exact[first:end], got[first:end])
        self.pools.copy_state(1, 0)


def measure(backend: Backend, prompts: list[list[int]]) -> dict[str, Any]:
    tallies: dict[SnapshotDtype, list[Tally]] = {d: [Tally() for _ in DISTANCES] for d in ("fp32", "bf16", "fp8")}
    for ids in prompts:
        run, at = Run(backend, ids), 0
        for boundary in BOUNDARIES:
            if boundary + REST > len(ids):
                break
            run.consume(at, boundary, wanted=False)
            run.measure(boundary, REST, tallies)
            at = boundary
    layout = backend.layout(BLOCK)
    return {
        dtype: {
            "bytes": sum(packed.region_bytes(layout, dtype)),
            "by_distance": {
                f"{first}..{end - 1}": tally.summary()
                for (first, end), tally in zip(DISTANCES, distances, strict=True)
            },
        }
        for dtype, distances in tallies.items()
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=len(TEXTS) + len(DOCUMENTS))
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    backend = load_backend(MODEL, kind="auto", threads=1, numerics="invariant")
    tokenizer = Tokenizer.load(MODEL)
    prompts = [tokenizer.encode(text)[:PROMPT_TOKENS] for text in list(texts())[: args.texts]]
    forms = measure(backend, prompts)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    result = {
        "commit": commit.strip(), "model": "k3-nano", "backend": backend.name, "python": platform.python_version(),
        "texts": len(prompts), "boundaries": BOUNDARIES, "forms": forms,
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("form  bytes    distance   rel. L2 median   p99        largest    top-1 flips   of clear ones")
    for dtype, form in forms.items():
        for distance, row in form["by_distance"].items():
            print(
                f"{dtype:5} {form['bytes']:8,} {distance:>8}   {row['relative_l2_median']:.2e}       "
                f"{row['relative_l2_p99']:.2e}   {row['largest_absolute']:.2e}   "
                f"{row['top1_flips']:4}/{row['positions']:<6} {row['clear_top1_flips']}/{row['clear_positions']}"
            )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
