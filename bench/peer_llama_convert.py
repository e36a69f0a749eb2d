"""Run llama.cpp's own K3 converter on one of our checkpoints, which carry a tiktoken file and no remote code.

usage: peer_llama_convert.py LLAMA_CPP CHECKPOINT OUT.gguf   (in the converter's environment)
"""

from __future__ import annotations

import base64
import runpy
import sys
from itertools import pairwise
from pathlib import Path


def byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in keep}
    extra = 0
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + extra)
            extra += 1
    return table


def merge_parts(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """The two earlier entries that the token's own merge joins."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        found = [(ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(found)
        if rank >= ranks[token]:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def set_vocab(model) -> None:
    lines = (model.dir_model / "tiktoken.model").read_text().split("\n")
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines if line}
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    merges = []
    for token in ranks:
        parts = merge_parts(ranks, token) if len(token) > 1 else []
        if len(parts) == 2:
            merges.append(" ".join(spell(p) for p in parts))
    size = model.hparams["vocab_size"]
    tokens = [spell(t) for t, _ in sorted(ranks.items(), key=lambda item: item[1])]
    tokens += [f"<|special_{i}|>" for i in range(len(tokens), size)]
    writer = model.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("kimi-k2")
    writer.add_token_list(tokens)
    writer.add_token_types([1 if i < len(ranks) else 3 for i in range(size)])  # normal, control
    writer.add_token_merges(merges)
    writer.add_eos_token_id(model.hparams["eos_token_id"])


def main() -> None:
    root, checkpoint, out = (Path(a) for a in sys.argv[1:4])
    sys.path[:0] = [str(root), str(root / "gguf-py")]
    from conversion.kimi_k3 import KimiK3Model

    KimiK3Model.set_vocab = set_vocab
    sys.argv = ["convert_hf_to_gguf.py", str(checkpoint), "--outfile", str(out), "--outtype", "bf16"]
    runpy.run_path(str(root / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
