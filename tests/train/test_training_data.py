"""The corpus's filters, and conversations that the project's own renderer and parser agree about."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from model import renderer
from model.parser import parse_output
from model.tokenizer import Tokenizer
from tests.golden import golden_dir
from train import conversations, corpus, heldout

SOURCE = '''
def scaled(values, factor=2):
    """Multiply every value by a factor."""
    return [value * factor for value in values]


class Box:
    def area(self):
        """Return the area of the box."""
        return self.width * self.height
'''


@pytest.fixture(scope="module")
def toy_tokenizer() -> Tokenizer:
    return Tokenizer.load(golden_dir("chat"))


def document(text: str = SOURCE, path: str = "boxes/box.py") -> corpus.Document:
    return corpus.Document(package="boxes", path=path, text=text)


@pytest.mark.parametrize("seed", range(40))
def test_every_answer_of_a_conversation_parses_to_what_was_said(seed: int, toy_tokenizer: Tokenizer) -> None:
    request = next(conversations.requests([document()], random.Random(seed)))
    for index, message in enumerate(request["messages"]):
        if message["role"] != "assistant":
            continue
        before = {**request, "messages": request["messages"][:index], "add_generation_prompt": True}
        upto = {**request, "messages": request["messages"][: index + 1]}
        start = renderer.encode(renderer.render(before), toy_tokenizer).ids
        whole = renderer.encode(renderer.render(upto), toy_tokenizer).ids
        assert whole[: len(start)] == start
        thinking = request.get("thinking", True)
        parsed = parse_output(whole[len(start) :], toy_tokenizer, thinking=thinking, call_id=str)
        assert parsed.ok, parsed.problem
        assert parsed.content == message["content"]
        said = [json.loads(call.arguments) for call in parsed.tool_calls]
        assert said == [call["function"]["arguments"] for call in message.get("tool_calls", [])]


def test_functions_keep_their_code_without_the_docstring() -> None:
    found = {function.name: function for function in conversations.functions(document())}
    assert found.keys() == {"scaled", "area"}
    scaled = found["scaled"]
    assert scaled.plain == "def scaled(values, factor=2):\n    return [value * factor for value in values]"
    assert scaled.arguments == ("values", "factor")
    assert '"""' not in scaled.plain
    assert scaled.summary in scaled.full


@pytest.mark.parametrize(
    ("path", "text", "kept"),
    [
        ("a/code.py", "x = 'a line of code'\n" * 40, True),
        ("a/_vendor/code.py", "x = 'a line of code'\n" * 40, False),
        ("a/code.js", "x = 'a line of code'\n" * 40, False),
        ("a/tiny.py", "x = 1\n", False),
        ("a/long.py", "x = '" + "y" * 600 + "'\n", False),
        ("a/numbers.py", "x = [123, 456, 789]\n" * 40, False),
    ],
)
def test_what_is_wanted(path: str, text: str, kept: bool) -> None:
    assert (corpus.wanted(path, text.encode(), corpus.BYTES_MAX) is not None) == kept


def test_near_duplicates_go() -> None:
    lines = [f"value_{i} = compute({i})" for i in range(60)]
    changed = [*lines[:29], "value = other()", *lines[30:]]
    fresh = [f"other_{i} = different({i})" for i in range(60)]
    seen: set[int] = set()
    kept = corpus.without_near_duplicates([document("\n".join(part)) for part in (lines, changed, fresh)], seen)
    assert [one.text.split("\n")[0] for one in kept] == ["value_0 = compute(0)", "other_0 = different(0)"]


def test_nothing_held_out_comes_from_a_package_that_was_trained_on() -> None:
    sources = json.loads(heldout.SOURCES.read_text())
    by_role = {role: {s["name"] for s in sources if s["role"] == role} for role in ("train", "validation", "held")}
    files = json.loads(heldout.FILES_LIST.read_text())
    assert {entry["package"] for entry in files} <= by_role["held"]
    assert not by_role["held"] & (by_role["train"] | by_role["validation"])
    assert len(files) >= 300
    assert sum(entry["bytes"] for entry in files) >= 2_000_000
    assert len({entry["sha256"] for entry in files}) == len(files)
    assert len(json.loads(heldout.PROMPTS_LIST.read_text())) == 50


def test_a_vocabulary_tokenises_alike_in_the_trainer_and_in_tiktoken(tmp_path: Path) -> None:
    vocabulary = pytest.importorskip(
        "train.vocabulary", reason="the training extra is not installed", exc_type=ImportError
    )
    bpe = vocabulary.train([SOURCE, "naïve 漢字 text  \n\n" * 30], num_ranks=300)
    vocabulary.write(vocabulary.ranks(bpe), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.num_ranks == 300
    vocabulary.verify(bpe, tokenizer, [SOURCE, "def naïve(漢字):\n\treturn 'x'  \n", "it's 12345 \r\n"])
