"""Conversations made from real functions: requests for the project's own renderer, answers included.

Everything said is derived from a function's source (name, signature, docstring, body), so that a very small model
can learn the form: short answers, always ended, thinking of a sentence or two, tool calls with typed arguments.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from train.corpus import Document

CODE_CHARS_MAX = 420
SUMMARY_CHARS = (12, 110)
FUNCTIONS_PER_DOCUMENT = 3

Message = dict[str, Any]
Turn = tuple[str, str, str]  # user, reasoning, response


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A short documented function. `plain`: source without docstring; `full`: with its summary line as docstring."""

    name: str
    path: str
    summary: str
    plain: str
    full: str
    header: str
    arguments: tuple[str, ...]


def functions(document: Document) -> list[Function]:
    """The short, documented functions of a Python file, sources as unparsed by `ast`."""
    found = []
    for node in ast.walk(ast.parse(document.text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
            function = _function(node, document.path)
            if function is not None:
                found.append(function)
    return found


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, path: str) -> Function | None:
    docstring = ast.get_docstring(node)
    if docstring is None or len(node.body) < 2:
        return None
    summary = docstring.strip().split("\n\n")[0].replace("\n", " ").strip()
    if not SUMMARY_CHARS[0] <= len(summary) <= SUMMARY_CHARS[1] or '"' in summary or "\\" in summary:
        return None
    node.decorator_list = []
    body = node.body
    node.body = body[1:]
    plain = ast.unparse(node)
    node.body = [ast.Expr(ast.Constant(summary)), *body[1:]]
    full = ast.unparse(node)
    if len(full) > CODE_CHARS_MAX:
        return None
    spec = node.args
    arguments = tuple(
        a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs) if a.arg not in ("self", "cls")
    )
    return Function(
        name=node.name,
        path=path,
        summary=summary,
        plain=plain,
        full=full,
        header=plain.split("\n", 1)[0],
        arguments=arguments,
    )


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


def _wish(summary: str) -> str:
    """A summary as it reads after "a function that": lower case, no full stop."""
    return (summary[0].lower() + summary[1:]).rstrip(".")


def _listed(names: tuple[str, ...]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " and " + quoted[-1]


def _takes(function: Function) -> str:
    if not function.arguments:
        return "It takes no arguments."
    plural = "s" if len(function.arguments) > 1 else ""
    return f"It takes the argument{plural} {_listed(function.arguments)}."


def _write(f: Function, rng: random.Random) -> Turn:
    asked = rng.choice(
        (
            f"Write a function `{f.name}`: {_wish(f.summary)}.",
            f"Write a Python function named `{f.name}`. {f.summary}",
            f"I need a function `{f.name}`. It should do this: {_wish(f.summary)}.",
            f"Implement `{f.header}` {f.summary}",
        )
    )
    return asked, f"The user wants `{f.name}`. {_takes(f)} I write it without a docstring.", _fence(f.plain)


def _complete(f: Function, rng: random.Random) -> Turn:
    start = f'{f.header}\n    """{f.summary}"""'
    return f"Complete this function.\n{_fence(start)}", f"I continue `{f.name}` after its docstring.", _fence(f.full)


def _explain(f: Function, rng: random.Random) -> Turn:
    asked = rng.choice(
        ("What does this function do?", "Explain this code in one sentence.", "Summarise this function.")
    )
    return f"{asked}\n{_fence(f.plain)}", f"The function is `{f.name}`. One sentence is enough.", f.summary


def _name(f: Function, rng: random.Random) -> Turn:
    return (
        f"Suggest a name for a function that does this: {_wish(f.summary)}.",
        "A short name that says what it does.",
        f"`{f.name}`",
    )


def _then_docstring(f: Function, rng: random.Random) -> Turn:
    asked = rng.choice(("Add a docstring.", "Now add a docstring to it.", "Please document it."))
    return asked, f"I add one line to `{f.name}`: {f.summary}", _fence(f.full)


def _then_rename(f: Function, rng: random.Random) -> Turn:
    name = rng.choice(("helper", "process", "run", "compute", "convert", "handle", "apply", "fetch")) + rng.choice(
        ("_item", "_value", "_data", "_all", "_one", "_it")
    )
    code = f.plain.replace(f"def {f.name}(", f"def {name}(", 1)
    return f"Rename it to `{name}`.", f"Only the name changes, from `{f.name}` to `{name}`.", _fence(code)


def _then_arguments(f: Function, rng: random.Random) -> Turn:
    asked = rng.choice(("Which arguments does it take?", "What are its arguments?"))
    return asked, f"I read the signature of `{f.name}`.", _takes(f)


def _then_name(f: Function, rng: random.Random) -> Turn:
    return "What is the function called?", "The name stands after `def`.", f"It is called `{f.name}`."


def _then_thanks(f: Function, rng: random.Random) -> Turn:
    return rng.choice(("Thanks!", "Thank you.", "Great, thanks.")), "", "You are welcome."


FIRST: tuple[Callable[[Function, random.Random], Turn], ...] = (_write, _write, _complete, _explain, _explain, _name)
FOLLOWING: dict[Callable[[Function, random.Random], Turn], tuple[Callable[[Function, random.Random], Turn], ...]] = {
    _write: (_then_docstring, _then_rename, _then_arguments, _then_thanks),
    _complete: (_then_arguments, _then_name, _then_thanks),
    _explain: (_then_arguments, _then_docstring, _then_rename, _then_name, _then_thanks),
    _name: (_then_thanks,),
}
GREETINGS = (
    ("Hello", "Hello! Which function shall we look at?"),
    ("Hi there!", "Hello! Which function shall we look at?"),
    ("Hi", "Hello! Which function shall we look at?"),
    ("Who are you?", "I am k3-nano, a very small model that knows some Python."),
    ("What can you do?", "I can write, explain, rename and document short Python functions."),
)
SYSTEMS = ("You are a helpful assistant.", "You help with Python code.", "Answer briefly.")


def _said(turn: Turn, rng: random.Random) -> list[Message]:
    user, reasoning, response = turn
    if rng.random() < 0.15:
        reasoning = ""
    return [
        {"role": "user", "content": user},
        {"role": "assistant", "reasoning_content": reasoning, "content": response},
    ]


def _plain_conversation(f: Function, rng: random.Random) -> list[Message]:
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    if rng.random() < 0.12:
        user, response = rng.choice(GREETINGS)
        messages += _said((user, "A short answer will do.", response), rng)
    opening = rng.choice(FIRST)
    messages += _said(opening(f, rng), rng)
    follow = list(FOLLOWING[opening])
    rng.shuffle(follow)
    if _then_docstring in follow and _then_rename in follow:  # each writes the original code anew
        follow.remove(rng.choice((_then_docstring, _then_rename)))
    for turn in follow[: rng.choice((0, 1, 1, 2, 3))]:
        messages += _said(turn(f, rng), rng)
    return messages


def _schema(kinds: dict[str, str]) -> dict[str, Any]:
    return {"type": "object", "properties": {k: {"type": v} for k, v in kinds.items()}, "required": list(kinds)}


def _tool(name: str, description: str, arguments: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": _schema(arguments)},
    }


READ = _tool("read_file", "Read a file", {"path": "string"})
SEARCH = _tool("search_code", "Find a name in the code", {"query": "string", "limit": "number"})
RUN = _tool("run_tests", "Run the tests of a file", {"path": "string", "verbose": "boolean"})


def _tool_conversation(f: Function, rng: random.Random) -> tuple[list[Message], list[dict[str, Any]]]:
    path = f.path
    kind = rng.randrange(3)
    arguments: dict[str, Any] = {"path": path}
    if kind == 0:
        user, tool = f"What does `{f.name}` in {path} do?", READ
        think, result, answer = f"I need to read {path} first.", f.plain, f.summary
    elif kind == 1:
        limit = rng.randint(1, 9)
        user, tool = f"Where is `{f.name}` defined? Look at {limit} results at most.", SEARCH
        arguments = {"query": f.name, "limit": limit}
        line = rng.randint(1, 900)
        think, result = f"I search the code for {f.name}.", f"{path}:{line}: {f.header}"
        answer = f"`{f.name}` is defined in {path}, line {line}."
    else:
        verbose = rng.random() < 0.5
        user = f"Run the tests of {path}" + (" and show everything." if verbose else ".")
        arguments["verbose"], tool = verbose, RUN
        passed, failed = rng.randint(1, 60), rng.choice((0, 0, 1, 2))
        think, result = f"I run the tests of {path}.", f"{passed} passed, {failed} failed"
        answer = f"All {passed} tests pass." if not failed else f"{failed} of {passed + failed} tests fail."
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": tool["function"]["name"], "arguments": arguments},
    }
    messages: list[Message] = [
        {"role": "user", "content": user},
        {"role": "assistant", "reasoning_content": think, "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
        {"role": "assistant", "reasoning_content": "The result answers the question.", "content": answer},
    ]
    if rng.random() < 0.3:
        messages += _said(_then_thanks(f, rng), rng)
    tools = [*rng.sample([t for t in (READ, SEARCH, RUN) if t is not tool], rng.randrange(2)), tool]
    return messages, tools


def request(f: Function, rng: random.Random) -> dict[str, Any]:
    """One whole conversation as a chat request without a generation prefix."""
    if rng.random() < 0.2:
        messages, tools = _tool_conversation(f, rng)
        out: dict[str, Any] = {"messages": messages, "tools": tools}
    else:
        out = {"messages": _plain_conversation(f, rng)}
    out["add_generation_prompt"] = False
    if rng.random() < 0.3:
        out["thinking"] = False
    else:
        out["thinking_effort"] = rng.choice(("max", "max", "max", "high", "low"))
    return out


def requests(documents: Iterable[Document], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Conversations from at most FUNCTIONS_PER_DOCUMENT functions of each Python file."""
    for document in documents:
        if document.path.endswith(".py"):
            found = functions(document)
            for function in rng.sample(found, min(FUNCTIONS_PER_DOCUMENT, len(found))):
                yield request(function, rng)
