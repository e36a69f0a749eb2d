from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.tokenizer import (
    NUM_SPECIAL,
    PATTERN,
    RUN_CHARS_MAX,
    StreamDecoder,
    Tokenizer,
    TokenizerError,
    guarded_pieces,
    read_ranks,
)

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/data/chat"
TOY = json.loads((GOLDEN / "cases.json").read_text())["toy_tokenizer"]
TOKENIZER = Tokenizer.load(GOLDEN)

# No clock: a busy machine must not fail a property.
quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

marker_like = st.sampled_from([*TOKENIZER.special_ids, "<|", "|>", "open", "<|open|", "[", "]"])
hostile_text = st.lists(st.one_of(marker_like, st.text(max_size=8)), max_size=12).map("".join)


def test_importing_the_torch_free_modules_imports_no_torch() -> None:
    code = (
        "import sys, model.tokenizer, model.renderer, model.parser; sys.exit('torch' in sys.modules or 'numpy' "
        "in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_pattern_and_special_ids_are_the_golden_ones() -> None:
    assert TOY["pattern"] == PATTERN
    assert TOKENIZER.num_ranks == TOY["num_ranks"]
    assert TOKENIZER.vocab_size == TOY["num_ranks"] + NUM_SPECIAL
    assert {name: TOKENIZER.special_ids[name] for name in TOY["special_tokens"]} == TOY["special_tokens"]
    assert len(TOKENIZER.special_ids) == NUM_SPECIAL
    assert TOKENIZER.stop_id == TOY["special_tokens"]["<|end_of_msg|>"]
    unnamed = set(TOKENIZER.special_ids) - set(TOY["special_tokens"])
    assert all(TOKENIZER.special_ids[name] == int(name[len("<|reserved_token_") : -2]) for name in unnamed)


@pytest.mark.parametrize("sample", TOY["samples"], ids=lambda sample: sample["text"][:12])
def test_golden_samples(sample: dict) -> None:
    assert TOKENIZER.encode(sample["text"]) == sample["ids_specials_disallowed"]
    assert TOKENIZER.encode(sample["text"], allow_special=True) == sample["ids_specials_allowed"]
    assert TOKENIZER.decode(sample["ids_specials_disallowed"]) == sample["text"]
    assert TOKENIZER.decode(sample["ids_specials_allowed"]) == sample["text"]


@quick
@given(hostile_text)
def test_outside_text_never_yields_a_special_id_and_survives(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert not any(TOKENIZER.is_special(token_id) for token_id in ids)
    assert TOKENIZER.decode(ids) == text


@quick
@given(hostile_text)
def test_allowed_specials_match_tiktoken(text: str) -> None:
    plain = tiktoken.Encoding(
        name="reference",
        pat_str=TOY["pattern"],
        mergeable_ranks=read_ranks(GOLDEN / "tiktoken.model"),
        special_tokens=dict(TOKENIZER.special_ids),
    )
    assert TOKENIZER.encode(text, allow_special=True) == plain.encode(text, allowed_special="all")


def test_lone_surrogates_become_replacement_characters() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a\ufffdb"


def slow_pieces(text: str, piece_chars: int, run_chars: int) -> list[str]:
    """The guards, a character at a time."""
    pieces = []
    for start in range(0, len(text), piece_chars):
        piece, run, current = "", 0, None
        for char in text[start : start + piece_chars]:
            run = run + 1 if char.isspace() == current else 1
            current = char.isspace()
            if run > run_chars:
                pieces.append(piece)
                piece, run = "", 1
            piece += char
        pieces.append(piece)
    return pieces


@quick
@given(
    st.lists(st.tuples(st.sampled_from(["x", " ", "\u3000", "\n", "é"]), st.integers(1, 40)), max_size=20),
    st.integers(2, 9),
    st.integers(5, 60),
)
def test_guards_cut_where_a_slow_reading_does(runs: list[tuple[str, int]], run_chars: int, piece: int) -> None:
    text = "".join(char * count for char, count in runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.tokenizer.RUN_CHARS_MAX", run_chars)
        patch.setattr("model.tokenizer.PIECE_CHARS_MAX", piece)
        assert list(guarded_pieces(text)) == slow_pieces(text, piece, run_chars)


@pytest.mark.parametrize("count", [RUN_CHARS_MAX, RUN_CHARS_MAX + 1, 400_001, 900_000])
@pytest.mark.parametrize("char", ["a", " "])
def test_long_runs_are_cut_and_survive(char: str, count: int) -> None:
    text = "words before " + char * count + " and after"
    assert list(guarded_pieces(text)) == slow_pieces(text, 400_000, RUN_CHARS_MAX)
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@quick
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60), st.lists(st.integers(1, 5), max_size=60))
def test_stream_decoder_adds_up_to_decode(ids: list[int], sizes: list[int]) -> None:
    decoder, text, start = StreamDecoder(TOKENIZER), "", 0
    for size in [*sizes, len(ids)]:
        text += decoder.push(ids[start : start + size])
        start += size
    assert text + decoder.flush() == TOKENIZER.decode(ids)


def test_stream_decoder_holds_back_part_of_a_character() -> None:
    ids = TOKENIZER.encode("é")
    assert len(ids) == 2
    decoder = StreamDecoder(TOKENIZER)
    assert [decoder.push(ids[:1]), decoder.push(ids[1:]), decoder.flush()] == ["", "é", ""]
    assert [decoder.push(ids[:1]), decoder.flush(), decoder.push(ids)] == ["", "\ufffd", "é"]


@pytest.mark.parametrize("ids", [[-1], [TOKENIZER.vocab_size], [0, 10**9]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(IndexError, match="token ids"):
        TOKENIZER.decode(ids)


LINES = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*LINES[:9], b"!!!! 9"], r"tiktoken\.model, line 10: expected a base64 token.*found '!!!! 9'"),
        ([*LINES[:9], b"YWI="], r"line 10: expected a base64 token, a space and a rank, found 'YWI='"),
        ([*LINES[:9], b"YWI= nine"], "line 10: expected a base64"),
        ([*LINES[:9], b"YWI= -9"], "line 10: expected a base64"),
        ([*LINES[:9], b"= 9"], "line 10: expected a base64"),
        ([*LINES[:9], b"\xff\x00 9"], "line 10: expected a base64"),
        ([*LINES, b"AA== 256"], r"line 257: expected each token and rank once, found token b'\\x00' again"),
        ([*LINES, b"YWI= 7"], "line 257: expected each token and rank once, found rank 7 again"),
        ([*LINES, b"YWI= 257"], r"expected ranks 0\.\.256, found no rank 256"),
        (LINES[:255], "each of the 256 bytes, found none for 0xff"),
        ([], "each of the 256 bytes, found none for 0x00"),
    ],
)
def test_a_damaged_vocabulary_is_named(tmp_path: Path, lines: list[bytes], message: str) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines))
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(tmp_path)


def test_a_missing_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tiktoken\.model: expected a tiktoken vocabulary, found No such"):
        Tokenizer.load(tmp_path)


def configured(tmp_path: Path, added: object) -> Tokenizer:
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(LINES))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return Tokenizer.load(tmp_path)


def test_a_checkpoint_may_name_its_special_slots(tmp_path: Path) -> None:
    tokenizer = configured(tmp_path, {str(256 + 65): {"content": "<osagent_mode>"}})
    assert tokenizer.encode("a<osagent_mode>", allow_special=True) == [97, 256 + 65]
    assert tokenizer.decode([256 + 65]) == "<osagent_mode>"
    assert not any(map(tokenizer.is_special, tokenizer.encode("<osagent_mode>")))


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"259": {"content": "<open>"}}, r"expected '<\|open\|>' in slot 3, found '<open>'"),
        ({"300": {"content": "[BOS]"}}, r"expected a name of its own for each id, found '\[BOS\]' twice"),
        ({"512": {"content": "<late>"}}, r"expected ids 256\.\.511"),
        ({"300": {}}, r"expected ids 256\.\.511, each with its name"),
        ([], "expected an object of id to token"),
    ],
)
def test_damaged_special_names_are_named(tmp_path: Path, added: object, message: str) -> None:
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json, added_tokens_decoder: {message}"):
        configured(tmp_path, added)


def test_encoding_costs_little_more_than_tiktoken() -> None:
    """Best of three on both sides in CPU time, so that a busy machine does not decide."""
    text = "def f(x):\n    return {'key': x + 1}  # a comment, then more words\n" * 6_000

    def best(encode: Callable[[str], list[int]]) -> float:
        times = []
        for _ in range(3):
            start = time.process_time()
            encode(text)
            times.append(time.process_time() - start)
        return min(times)

    plain = tiktoken.Encoding(
        name="reference",
        pat_str=TOY["pattern"],
        mergeable_ranks=read_ranks(GOLDEN / "tiktoken.model"),
        special_tokens={},
    )
    assert best(TOKENIZER.encode) < 1.5 * best(plain.encode_ordinary)
