"""The held-out evaluation sets: files and prompts chosen from the held-out packages by a seed.

`python -m train.heldout` writes `held_out.json` and `chat_prompts.json` from the corpus; both are committed, so that
an evaluation needs only the held-out archives.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from train import conversations, corpus

FOLDER = Path(__file__).parent
FILES_LIST = FOLDER / "held_out.json"
PROMPTS_LIST = FOLDER / "chat_prompts.json"
SOURCES = FOLDER / "sources.json"
NUM_FILES = 330
NUM_PROMPTS = 50


def choose_files(documents: list[corpus.Document], rng: random.Random) -> list[dict[str, Any]]:
    """NUM_FILES of the documents that survived near-duplicate removal against everything trained on."""
    chosen = sorted(rng.sample(documents, NUM_FILES), key=lambda document: (document.package, document.path))
    return [
        {
            "package": document.package,
            "path": document.path,
            "bytes": len(document.text.encode()),
            "sha256": hashlib.sha256(document.text.encode()).hexdigest(),
        }
        for document in chosen
    ]


def prompt(request: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A conversation cut before one of its answers: what the model is then asked to say."""
    messages = request["messages"]
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    cut = {**request, "messages": messages[: rng.choice(answers)]}
    del cut["add_generation_prompt"]
    return cut


def choose_prompts(documents: list[corpus.Document], rng: random.Random) -> list[dict[str, Any]]:
    requests = list(conversations.requests(documents, rng))
    return [prompt(request, rng) for request in rng.sample(requests, NUM_PROMPTS)]


def load_files(downloads: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Every listed file with its content, downloaded by pip where missing.

    Raises: ValueError if an archive or a file is not the listed one.
    """
    sources = [source for source in json.loads(SOURCES.read_text()) if source["role"] == "held"]
    corpus.fetch(sources, downloads)
    contents: dict[tuple[str, str], bytes] = {}
    for source in sources:
        for path, content in corpus.archive_files(downloads / "held" / source["file"]):
            contents[source["name"], path] = content.replace(b"\r\n", b"\n")
    out = []
    for entry in json.loads(FILES_LIST.read_text()):
        content = contents[entry["package"], entry["path"]]
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise ValueError(f"{entry['package']} {entry['path']}: not the listed content")
        out.append((entry, content))
    return out


def _write(path: Path, entries: list[dict[str, Any]]) -> None:
    """One entry a line, so that a change is readable."""
    path.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n")


def main() -> None:
    documents = corpus.read(FOLDER / ".work", "held")
    rng = random.Random(0)
    _write(FILES_LIST, choose_files(documents, rng))
    _write(PROMPTS_LIST, choose_prompts(documents, rng))


if __name__ == "__main__":
    main()
