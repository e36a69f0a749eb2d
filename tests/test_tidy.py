"""The house's rules, kept by a test: who may import whom, how long files and functions may be, what never appears."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES, MAX_FUNCTION_LINES = 400, 70
ALLOWED: dict[str, set[str]] = {
    "moonrelay": set(),
    "model": {"moonrelay"},
    "engine": {"moonrelay", "model"},
    "cachestore": {"moonrelay"},
    "prefill": {"moonrelay", "model", "engine", "cachestore"},
    "decode": {"moonrelay", "model", "engine", "cachestore"},
    "router": {"moonrelay", "model", "cachestore"},
    "train": {"moonrelay", "model", "engine"},
    "sim": {"moonrelay", "model", "engine", "cachestore", "prefill", "decode", "router"},
}
TORCH_FREE_FOR_ROUTER = {
    "tokenizer",
    "renderer",
    "parser",
    "splice",
    "spelling",
    "output",
    "chat",
    "xtml",
    "config",
    "errors",
    "families",
    "tool_calls",
}
PURE = {"asyncio", "time", "random", "threading", "socket", "os", "grpc", "redis", "torch"}


def sources(*folders: str) -> list[Path]:
    found = [p for f in folders or ALLOWED for p in sorted((ROOT / f).rglob("*.py"))]
    return [p.relative_to(ROOT) for p in found if "stubs" not in p.parts and ".work" not in p.parts]


def imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


@pytest.mark.parametrize("path", sources(), ids=str)
def test_imports_point_down(path: Path) -> None:
    if path == Path("moonrelay/cli.py"):
        return  # the composition root
    package = path.parts[0]
    roots = {name.split(".")[0] for name in imported(path)} & ALLOWED.keys()
    assert not roots - {package} - ALLOWED[package]


@pytest.mark.parametrize("path", sources("router"), ids=str)
def test_router_takes_only_the_torch_free_half_of_model(path: Path) -> None:
    for name in imported(path):
        if name.split(".")[0] == "model" and "." in name:
            assert name.split(".")[1] in TORCH_FREE_FOR_ROUTER, name
        assert name.split(".")[0] != "torch"


@pytest.mark.parametrize("path", [p for p in sources() if p.name == "core.py"], ids=str)
def test_cores_do_no_io(path: Path) -> None:
    assert not {name.split(".")[0] for name in imported(path)} & PURE


@pytest.mark.parametrize("path", [*sources(), *sources("tests", "bench")], ids=str)
def test_files_and_functions_stay_short(path: Path) -> None:
    text = (ROOT / path).read_text()
    assert len(text.splitlines()) <= MAX_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", sources(), ids=str)
def test_only_edges_catch_everything(path: Path) -> None:
    """`except Exception` stands at a process's edge or a request's, and nowhere in a core, model or engine op."""
    caught = [
        node
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
        )
    ]
    limit = 2 if path.stem in ("edge", "main", "service", "http", "grpc", "frontend", "engine", "thread") else 0
    assert len(caught) <= limit


def test_no_sentence_about_how_this_was_made() -> None:
    """The repository speaks of the project alone."""
    forbidden = ["/" + "work/", "/" + "root/", "pypi" + ".org", "pythonhosted" + ".org", "index" + "-url"]
    written = [p.relative_to(ROOT) for d in (*ALLOWED, "tests", "bench") for p in (ROOT / d).rglob("*.md")]
    texts = [*written, *[p.relative_to(ROOT) for p in ROOT.glob("*.md")]]
    for path in [*sources(), *sources("tests", "bench"), *[t for t in texts if ".work" not in t.parts]]:
        text = (ROOT / path).read_text()
        assert not [word for word in forbidden if word in text], path


def test_no_utils_module() -> None:
    assert not [p for p in sources() if p.stem in ("utils", "util", "helpers", "common")]
