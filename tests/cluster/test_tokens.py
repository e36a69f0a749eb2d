"""The tokens of a request do not depend on where or beside what it was computed.

Fifty prompts from the standard library's own source, greedy and seeded: aggregated and disaggregated, cold and
cached, alone and beside others.
"""

from __future__ import annotations

import ast
import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.harness import Cluster, wait_until

pytestmark = pytest.mark.cluster
MODULES = (
    "textwrap",
    "shlex",
    "fnmatch",
    "heapq",
    "bisect",
    "calendar",
    "difflib",
    "string",
    "statistics",
    "fractions",
)
NUM_PROMPTS, NEW_TOKENS = 50, 24


def real_prompts() -> list[str]:
    """The first lines of functions that people wrote, of very different lengths."""
    found: list[str] = []
    for module in MODULES:
        source = inspect.getsource(__import__(module))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                text = ast.get_source_segment(source, node) or ""
                found.append(text[: max(40, len(text) * 2 // 3)])
    step = len(found) // NUM_PROMPTS
    return found[::step][:NUM_PROMPTS]


def outcome(answer: dict[str, Any]) -> tuple[list[int], str]:
    choice = answer["choices"][0]
    return choice["token_ids"], choice["finish_reason"]


def sampling(index: int) -> dict[str, Any]:
    """Every second prompt is sampled, with a seed of its own."""
    base: dict[str, Any] = {"max_tokens": NEW_TOKENS, "return_token_ids": True}
    if index % 2:
        base |= {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 1000 + index}
    return base


def alone(cluster: Cluster, prompts: list[str]) -> list[dict[str, Any]]:
    return [cluster.complete(prompt, **sampling(i)) for i, prompt in enumerate(prompts)]


def together(cluster: Cluster, prompts: list[str]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda item: cluster.complete(item[1], **sampling(item[0])), enumerate(prompts)))


def test_fifty_prompts_give_the_same_tokens_on_every_path(cluster: Cluster, start_cluster) -> None:
    prompts = real_prompts()
    assert len(set(prompts)) == NUM_PROMPTS
    with start_cluster("--aggregated") as aggregated:
        want = [outcome(a) for a in alone(aggregated, prompts)]
        assert [outcome(a) for a in together(aggregated, prompts)] == want
    assert len({tuple(ids) for ids, _ in want}) > NUM_PROMPTS * 3 // 4  # the prompts do ask for different answers

    cold = alone(cluster, prompts)
    assert [outcome(a) for a in cold] == want
    cached = together(cluster, prompts)
    assert [outcome(a) for a in cached] == want
    hits = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in cached]
    assert sum(h > 0 for h in hits) >= NUM_PROMPTS // 4, hits
    for answer in cold + cached:
        assert answer["usage"]["moonrelay"]["prefill"] and answer["usage"]["moonrelay"]["decode"]


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_hits_at_a_block_boundary_and_one_token_either_side(cluster: Cluster, extra: int) -> None:
    """Prompts of k*64-1, k*64 and k*64+1 tokens, sent until the cache serves them: the same tokens, and a hit."""
    ids = [300 + (7 * i + extra) % 5000 for i in range(256 + extra)]
    body = {"return_token_ids": True, "max_tokens": 16}
    cold = cluster.complete(ids, **body)
    expected_hit = (len(ids) - 1) // 64 * 64
    found: list[dict[str, Any]] = []

    def served_from_cache() -> bool:
        found.append(cluster.complete(ids, **body))
        return bool(found[-1]["usage"]["prompt_tokens_details"]["cached_tokens"])

    wait_until(served_from_cache, 10, "a cache hit")
    assert found[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == expected_hit
    assert {str(outcome(a)) for a in found} == {str(outcome(cold))}


def test_a_conversations_second_turn_starts_where_its_first_ended(cluster: Cluster) -> None:
    system = "Answer briefly. " * 30
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Write a function that adds."}]
    body = {"model": cluster.model, "messages": messages, "max_tokens": 48, "temperature": 0}
    status, first = cluster.post("/v1/chat/completions", body)
    assert status == 200, first
    said = first["choices"][0]["message"]
    messages += [{k: said[k] for k in ("role", "content", "reasoning_content") if said.get(k) is not None}]
    messages += [{"role": "user", "content": "Now one that subtracts."}]

    def cached() -> int:
        code, answer = cluster.post("/v1/chat/completions", {**body, "messages": messages})
        assert code == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    wait_until(lambda: cached() > 0, 10, "a cache hit")
    shared = first["usage"]["prompt_tokens"] // 64 * 64
    assert cached() >= shared - 64
