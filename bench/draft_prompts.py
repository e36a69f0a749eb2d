"""Held-out prompts for the drafter's bench, by rule and seed: beginnings of files that nothing was trained on.

Code: a held-out file as it is. Prose: the sentences of one file's docstrings, as a text document of their own. The
files are those of `train/held_out.json`; pip fetches their archives where they are not there yet.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model.tokenizer import Tokenizer
from train import heldout

Kind = Literal["code", "prose"]
KINDS: tuple[Kind, ...] = ("code", "prose")
DOWNLOADS = Path(heldout.FOLDER) / ".work" / "dl"
LENGTHS = (64, 384)  # tokens of a prompt, drawn evenly between; a shorter text is taken whole from the lower one on
PARAGRAPH_CHARS_MIN = 60
LETTERS_MIN = 0.9  # of a prose paragraph's characters are letters or spaces
_MARKUP = re.compile(r"^(>>>|\.\. |:|[-*=#|+~^]|\d+\.|@)|::$|^\s", re.MULTILINE)


class NoHeldOut(Exception):
    """The held-out archives are neither here nor to be had."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`source`: package and path of the file that the ids begin."""

    kind: Kind
    source: str
    ids: tuple[int, ...]


def held_out_prompts(tokenizer: Tokenizer, count: int, seed: int = 0, downloads: Path = DOWNLOADS) -> list[Prompt]:
    """`count` prompts, code and prose in turns, so that any beginning of the list is a fair sample of both.

    Raises: NoHeldOut.
    """
    try:
        files = heldout.load_files(downloads)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise NoHeldOut(f"the held-out archives of train/sources.json are not in {downloads}: {error}") from error
    rng = random.Random(seed)
    rng.shuffle(files)
    texts = [(f"{entry['package']}/{entry['path']}", content.decode()) for entry, content in files]
    python = [(source, text) for source, text in texts if source.endswith(".py")]
    per_kind = {kind: count // 2 + (kind == "code") * (count % 2) for kind in KINDS}
    code = _beginnings("code", python, tokenizer, per_kind["code"], rng)
    prose = _beginnings("prose", ((s, prose_of(t)) for s, t in python), tokenizer, per_kind["prose"], rng)
    return [prompt for pair in zip(code, prose, strict=False) for prompt in pair] + code[len(prose) :]


def _beginnings(
    kind: Kind, texts: Iterable[tuple[str, str]], tokenizer: Tokenizer, count: int, rng: random.Random
) -> list[Prompt]:
    """The first `count` texts that are long enough, each up to a length of its own."""
    found: list[Prompt] = []
    for source, text in texts:
        length = rng.randint(*LENGTHS)
        ids = tokenizer.encode(text[: LENGTHS[1] * 16])  # enough characters for the longest prompt
        if len(found) < count and len(ids) >= LENGTHS[0]:
            found.append(Prompt(kind, source, tuple(ids[:length])))
    if len(found) < count:
        raise NoHeldOut(f"{len(found)} of {count} {kind} prompts: too few held-out files are long enough")
    return found


def prose_of(source: str) -> str:
    """The paragraphs of a Python file's docstrings that are sentences, in the file's order."""
    paragraphs: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            paragraphs += inspect.cleandoc(docstring).split("\n\n") if docstring else []
    return "\n\n".join(paragraph for paragraph in map(str.strip, paragraphs) if is_prose(paragraph))


def is_prose(paragraph: str) -> bool:
    """Sentences: no markup, no indentation, and hardly anything but letters and spaces."""
    letters = sum(character.isalpha() or character.isspace() for character in paragraph)
    return (
        len(paragraph) >= PARAGRAPH_CHARS_MIN
        and letters >= LETTERS_MIN * len(paragraph)
        and not _MARKUP.search(paragraph)
    )


def looped(output: Sequence[int], window: int = 16) -> list[bool]:
    """Of each position n in 0..len(output): whether the `window` tokens before n occurred earlier in the output."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for n in range(len(output) + 1):
        last = tuple(output[n - window : n]) if n >= window else None
        found.append(last is not None and last in seen)
        if last is not None:
            seen.add(last)
    return found
