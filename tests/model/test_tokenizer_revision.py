"""Two checkpoints share a revision only where ids and rendered prompts mean the same in both."""

from __future__ import annotations

import json
import shutil

from model.tokenizer import tokenizer_revision
from tests.golden import golden_dir


def test_it_follows_the_vocabulary_and_the_names_not_the_file(tmp_path):
    source = golden_dir("chat") / "tiktoken.model"
    first = tokenizer_revision(golden_dir("chat"))
    lines = source.read_text().splitlines()
    (tmp_path / "tiktoken.model").write_text("\n".join(reversed(lines)))
    assert tokenizer_revision(tmp_path) == first  # the order of lines means nothing

    base64_of = [line.split()[0] for line in lines]
    base64_of[-1], base64_of[-2] = base64_of[-2], base64_of[-1]
    (tmp_path / "tiktoken.model").write_text("\n".join(f"{b} {i}" for i, b in enumerate(base64_of)))
    assert tokenizer_revision(tmp_path) != first

    shutil.copy(source, tmp_path / "tiktoken.model")
    named = {"added_tokens_decoder": {str(len(lines) + 30): {"content": "<|mine|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert tokenizer_revision(tmp_path) != first


def test_a_checkpoint_without_a_vocabulary_has_one_too(tmp_path):
    assert tokenizer_revision(tmp_path) == tokenizer_revision(golden_dir("k3_tiny_smooth"))
