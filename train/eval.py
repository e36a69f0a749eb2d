"""`moonrelay eval-nano`: bits per byte on held-out files and chat on held-out prompts, through the serving model.

What is measured is what is served: the exported checkpoint, the serving backend, the project's renderer and parser.
Every file starts from an empty context and is charged for all its tokens; the first, which nothing predicts, costs
log2(vocabulary).
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model import renderer
from model.backend import load_backend
from model.batch import Backend, Segment
from model.logits import logits_by_chunk
from model.parser import parse_output
from model.tokenizer import Tokenizer
from train import heldout

ZOO = Path(__file__).parent.parent / "model" / "zoo" / "k3_nano"
RESULTS = Path(__file__).parent.parent / "bench" / "results" / "eval-nano.json"
DOWNLOADS = Path(__file__).parent / ".work" / "dl"
BLOCK_TOKENS = 64
CHAT_TOKENS_MAX = 256
LIMITS = {"bits_per_byte": 1.7, "ended_share": 0.9, "parsed_share": 0.8}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
    """One held-out file: its size, what the model needs for it, what xz -9e needs."""

    package: str
    path: str
    file_bytes: int
    tokens: int
    bits: float
    xz_bytes: int


def file_bits(backend: Backend, ids: Sequence[int]) -> float:
    """Bits that the model needs for `ids` from an empty context, all of them charged."""
    bits, position = math.log2(backend.config.vocab_size), 0
    for logits in logits_by_chunk(backend, ids):
        targets = torch.tensor(ids[position + 1 : position + 1 + len(logits)])
        position += len(logits)
        losses = torch.nn.functional.cross_entropy(logits[: len(targets)].double(), targets, reduction="sum")
        bits += losses.item() / math.log(2)
    return bits


def xz_bytes(content: bytes) -> int:
    return len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))


def evaluate_files(
    backend: Backend, tokenizer: Tokenizer, files: Sequence[tuple[dict[str, Any], bytes]]
) -> list[FileResult]:
    results = []
    for number, (entry, content) in enumerate(files, start=1):
        ids = tokenizer.encode(content.decode())
        results.append(
            FileResult(
                package=entry["package"],
                path=entry["path"],
                file_bytes=len(content),
                tokens=len(ids),
                bits=file_bits(backend, ids),
                xz_bytes=xz_bytes(content),
            )
        )
        if number % 20 == 0:
            done = sum(result.bits for result in results) / sum(result.file_bytes for result in results)
            print(f"{number} of {len(files)} files, {done:.3f} bits per byte so far", file=sys.stderr)
    return results


def summarise_files(results: Sequence[FileResult], contents: Sequence[bytes]) -> dict[str, Any]:
    size = sum(result.file_bytes for result in results)
    packages: dict[str, list[FileResult]] = {}
    for result in results:
        packages.setdefault(result.package, []).append(result)
    return {
        "files": len(results),
        "bytes": size,
        "tokens": sum(result.tokens for result in results),
        "bits_per_byte": sum(result.bits for result in results) / size,
        "bits_per_byte_mean_of_files": sum(r.bits / r.file_bytes for r in results) / len(results),
        "xz_bits_per_byte": 8 * sum(result.xz_bytes for result in results) / size,
        "xz_bits_per_byte_mean_of_files": sum(8 * r.xz_bytes / r.file_bytes for r in results) / len(results),
        "xz_one_stream_bits_per_byte": 8 * xz_bytes(b"".join(contents)) / size,
        "packages": {
            name: sum(r.bits for r in own) / sum(r.file_bytes for r in own) for name, own in sorted(packages.items())
        },
    }


def generate_greedy(
    backend: Backend, prompts: Sequence[Sequence[int]], tokens_max: int, stop: int
) -> list[list[int]]:
    """Each prompt's continuation at temperature 0, all decoded together; `stop` ends one and is included."""
    layout = backend.layout(BLOCK_TOKENS)
    blocks, used = [], 0
    for prompt in prompts:
        count = -(-(len(prompt) + tokens_max) // BLOCK_TOKENS)
        blocks.append(range(used, used + count))
        used += count
    rows, state = torch.zeros(used, layout.block_floats), torch.zeros(len(prompts), layout.slot_floats)
    pending = {i: list(prompt) for i, prompt in enumerate(prompts)}
    consumed, outputs = [0] * len(prompts), [list[int]() for _ in prompts]
    while pending:
        segments = [Segment(ids=ids, start=consumed[i], slot=i, blocks=blocks[i]) for i, ids in pending.items()]
        chosen = backend.forward(segments, rows, state).argmax(-1).tolist()
        for (i, ids), token in zip(list(pending.items()), chosen, strict=True):
            consumed[i] += len(ids)
            outputs[i].append(token)
            if token == stop or len(outputs[i]) == tokens_max:
                del pending[i]
            else:
                pending[i] = [token]
    return outputs


def evaluate_chat(backend: Backend, tokenizer: Tokenizer, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many answers end by themselves and parse, with every answer as it came."""
    rendered = [renderer.render(request) for request in requests]
    prompts = [renderer.encode(one, tokenizer).ids for one in rendered]
    outputs = generate_greedy(backend, prompts, CHAT_TOKENS_MAX, tokenizer.end_of_msg)
    answers = []
    for request, one, ids in zip(requests, rendered, outputs, strict=True):
        parsed = parse_output(ids, tokenizer, thinking=one.thinking, call_id=lambda index: f"call_{index}")
        answers.append(
            {
                "asked": request["messages"][-1].get("content", ""),
                "tokens": len(ids),
                "ended": parsed.ended,
                "ok": parsed.ok,
                "problem": parsed.problem,
                "answer": parsed.message(),
            }
        )
    return {
        "prompts": len(answers),
        "ended_share": sum(answer["ended"] for answer in answers) / len(answers),
        "parsed_share": sum(answer["ok"] for answer in answers) / len(answers),
        "tokens_mean": sum(answer["tokens"] for answer in answers) / len(answers),
        "answers": answers,
    }


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="moonrelay eval-nano", description=__doc__)
    parser.add_argument("model_dir", nargs="?", type=Path, default=ZOO)
    parser.add_argument("--sample", type=int, help="only this many of the held-out files, chosen by a fixed seed")
    parser.add_argument("--only", choices=("files", "chat"), help="leave the other half out")
    parser.add_argument("--backend", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--downloads", type=Path, default=DOWNLOADS, help="where the archives are or go")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def show(result: dict[str, Any]) -> bool:
    """Print the table; whether every limit is met."""
    checks = []
    if "files" in result:
        files = result["files"]
        print(f"{files['files']} held-out files, {files['bytes']:,} bytes, {files['tokens']:,} tokens")
        print(f"{'bits per byte':32} {'all bytes':>10} {'mean of files':>14}")
        for label, key in (("model", "bits_per_byte"), ("xz -9e, each file", "xz_bits_per_byte")):
            print(f"{label:32} {files[key]:10.3f} {files[f'{key}_mean_of_files']:14.3f}")
        print(f"{'xz -9e, all files as one stream':32} {files['xz_one_stream_bits_per_byte']:10.3f}")
        checks += [
            files["bits_per_byte"] < LIMITS["bits_per_byte"],
            files["bits_per_byte_mean_of_files"] < files["xz_bits_per_byte_mean_of_files"],
        ]
    if "chat" in result:
        chat = result["chat"]
        print(
            f"{chat['prompts']} held-out prompts at temperature 0: {chat['ended_share']:.0%} end by themselves "
            f"within {CHAT_TOKENS_MAX} tokens, {chat['parsed_share']:.0%} parse, {chat['tokens_mean']:.0f} tokens"
        )
        checks += [chat[name] >= LIMITS[name] for name in ("ended_share", "parsed_share")]
    return all(checks)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 every limit met, 1 not."""
    args = arguments(argv)
    tokenizer = Tokenizer.load(args.model_dir)
    backend = load_backend(args.model_dir, kind=args.backend, threads=args.threads, numerics="invariant")
    started = time.monotonic()
    result: dict[str, Any] = {"model": args.model_dir.name, "backend": backend.name}
    if args.only != "files":
        result["chat"] = evaluate_chat(backend, tokenizer, json.loads(heldout.PROMPTS_LIST.read_text()))
    if args.only != "chat":
        files = heldout.load_files(args.downloads)
        if args.sample is not None:
            files = random.Random(0).sample(files, min(args.sample, len(files)))
        results = evaluate_files(backend, tokenizer, files)
        result["files"] = summarise_files(results, [content for _, content in files])
    result["seconds"] = round(time.monotonic() - started, 1)
    met = show(result)
    result["met"] = met
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"{'all limits met' if met else 'a limit is missed'}; {args.out}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
