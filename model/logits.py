"""`moonrelay logits`: every position's fp32 logits of a checkpoint, to compare with another implementation."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from model.backend import load_backend
from model.batch import Backend, Segment
from model.config import load_config
from model.errors import BackendUnavailable, ModelError

BLOCK_TOKENS = 64
CHUNK_TOKENS = 256  # a multiple of 64, so the result is that of one pass; bounds the logits held at once


class _UsageError(ValueError):
    pass


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 written; 2 the ids, the model or the output cannot be used."""
    args = _parser().parse_args(argv)
    try:
        ids = _read_ids(args.ids, args.ids_file)
        config = load_config(args.model_dir)
        _check_ids(ids, config.vocab_size, config.context_len)
        backend = load_backend(args.model_dir, kind=args.backend, threads=args.threads, numerics="invariant")
        _write(args.out, logits_by_chunk(backend, ids), len(ids), config.vocab_size)
    except (_UsageError, ModelError, BackendUnavailable, OSError) as error:
        print(f"moonrelay logits: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: logits F32 [{len(ids)}, {config.vocab_size}] by the {backend.name} backend")
    return 0


def logits_by_chunk(backend: Backend, ids: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield the logits [chunk, vocab] of one sequence from its start, in order."""
    layout = backend.layout(BLOCK_TOKENS)
    blocks = range(-(-len(ids) // BLOCK_TOKENS))
    rows = torch.zeros(len(blocks), layout.block_floats)
    state = torch.zeros(1, layout.slot_floats)
    for start in range(0, len(ids), CHUNK_TOKENS):
        chunk = ids[start : start + CHUNK_TOKENS]
        segment = Segment(ids=chunk, start=start, slot=0, blocks=blocks, logits="all")
        yield backend.forward([segment], rows, state)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moonrelay logits", description="Write every position's fp32 logits as a safetensors file."
    )
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR", help="config.json and safetensors files")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--ids", help="token ids, separated by commas")
    source.add_argument("--ids-file", type=Path, help="a file of token ids, separated by commas or white space")
    parser.add_argument("--out", type=Path, required=True, help="file to write: one tensor, logits [T, vocab]")
    parser.add_argument("--backend", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--threads", type=int, choices=range(1, 257), default=1, metavar="N")
    return parser


def _read_ids(text: str | None, file: Path | None) -> list[int]:
    if file is not None:
        try:
            text = file.read_text(encoding="ascii")
        except UnicodeDecodeError as error:
            raise _UsageError(f"{file}: expected token ids, found bytes that are no digits") from error
    assert text is not None, "argparse requires one of --ids and --ids-file"
    words = text.replace(",", " ").split()
    if not words:
        raise _UsageError(f"{file or '--ids'}: expected at least one token id, found none")
    for word in words:
        if not re.fullmatch("-?[0-9]{1,40}", word):
            raise _UsageError(f"{file or '--ids'}: expected integers, found {word[:40]!r}")
    return [int(word) for word in words]


def _check_ids(ids: Sequence[int], vocab_size: int, context_len: int) -> None:
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise _UsageError(f"id at position {position}: expected 0 to {vocab_size - 1}, found {token}")
    if len(ids) > context_len:
        raise _UsageError(f"expected at most {context_len} ids, the model's context, found {len(ids)}")


def _write(path: Path, chunks: Iterator[torch.Tensor], tokens: int, vocab_size: int) -> None:
    """Stream the one tensor: the header is known beforehand, so no more than a chunk is ever held."""
    entry = {"dtype": "F32", "shape": [tokens, vocab_size], "data_offsets": [0, 4 * tokens * vocab_size]}
    header = json.dumps({"logits": entry}).encode()
    header += b" " * (-len(header) % 8)
    partial = path.with_name(f".{path.name}.{os.getpid()}")  # beside it, so that the rename is atomic
    try:
        with partial.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for chunk in chunks:
                file.write(chunk.contiguous().numpy().tobytes())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
