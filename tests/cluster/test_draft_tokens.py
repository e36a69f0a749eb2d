"""The drafter changes no answer: real processes with and without it, the same tokens, stops, lengths and logprobs.

Which prompts are asked changes from day to day; `make bench-draft` asks two hundred held-out ones.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.test_tokens import real_prompts

pytestmark = pytest.mark.cluster
NUM_PROMPTS, NEW_TOKENS = 8, 72
DAY = datetime.date.today().toordinal()


@pytest.fixture(scope="module")
def undrafted(start_cluster) -> Iterator[Cluster]:
    with start_cluster("--aggregated", "--no-draft") as running:
        yield running


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Every step drafts as much as it can, so that nothing depends on how long things take."""
    folder = tmp_path_factory.mktemp("fixed")
    with running_cluster(folder, MOONRELAY_DRAFT_ADAPTIVE="false", MOONRELAY_DRAFT_LEN_MAX="15") as running:
        yield running


def prompts() -> list[str]:
    """A window over real functions that moves on every day."""
    found = real_prompts()
    return [found[(DAY * NUM_PROMPTS + i) % len(found)] for i in range(NUM_PROMPTS)]


def ask(cluster: Cluster, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"max_tokens": NEW_TOKENS, "return_token_ids": True, "ignore_eos": True, **more}
    return cluster.complete(prompt, **body)


def said(answer: dict[str, Any]) -> tuple[Any, ...]:
    choice = answer["choices"][0]
    logprobs = choice.get("logprobs") or {}
    return choice["token_ids"], choice["text"], choice["finish_reason"], logprobs.get("token_logprobs")


def together(cluster: Cluster, asked: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda item: ask(cluster, item[0], **item[1]), asked))


def accepted(answers: list[dict[str, Any]]) -> int:
    """Drafted tokens that were kept: a test in which there are none shows nothing."""
    return sum(answer["usage"]["moonrelay"]["accepted_tokens"] for answer in answers)


def test_greedy_answers_and_their_logprobs(cluster: Cluster, fixed: Cluster, undrafted: Cluster) -> None:
    asked = [(prompt, {"logprobs": 1}) for prompt in prompts()]
    plain = together(undrafted, asked)
    assert all(answer["usage"]["moonrelay"]["drafted_tokens"] == 0 for answer in plain)
    want = [said(answer) for answer in plain]
    for running in (fixed, cluster):
        for _ in ("cold", "cached"):
            got = together(running, asked)
            assert [said(answer) for answer in got] == want, DAY
            assert accepted(got) > 0
    assert sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in got) > 0


def test_lengths_and_stop_strings_inside_what_a_step_keeps(fixed: Cluster, undrafted: Cluster) -> None:
    prompt = prompts()[0]
    whole = ask(undrafted, prompt)
    ids, text = whole["choices"][0]["token_ids"], whole["choices"][0]["text"]
    lengths = [(prompt, {"max_tokens": count}) for count in range(1, 13)]
    got = together(fixed, lengths)
    assert [answer["choices"][0]["token_ids"] for answer in got] == [ids[:count] for count in range(1, 13)]
    assert {answer["choices"][0]["finish_reason"] for answer in got} == {"length"}
    assert [answer["usage"]["completion_tokens"] for answer in got] == list(range(1, 13))
    stops = [(prompt, {"stop": [text[at : at + 5]]}) for at in range(3, len(text) - 5, max(len(text) // 10, 1))]
    want, found = together(undrafted, stops), together(fixed, stops)
    assert [said(answer) for answer in found] == [said(answer) for answer in want]
    assert "stop" in {answer["choices"][0]["finish_reason"] for answer in found}
    # A stop string ends the call before the worker has told of its drafts: the whole answer shows there are runs.
    assert accepted([ask(fixed, prompt)]) > 0


def test_seeded_answers_are_those_without_a_drafter(cluster: Cluster, fixed: Cluster, undrafted: Cluster) -> None:
    """Alone and in company, whatever the draft lengths: a request that names its seed keeps its own draws."""
    filters = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 20})
    asked = [(prompt, {**filters[i % 3], "seed": i}) for i, prompt in enumerate(prompts()[:4])]
    # Looping text: its drafts are kept where the penalties, which count them, still allow it.
    penalties = {"presence_penalty": 0.3, "frequency_penalty": 0.05, "logit_bias": {"32": -100, "10": 0.5}}
    asked += [(prompts()[0], {**penalties, "temperature": 0}), (prompts()[1], {**penalties, **filters[0], "seed": 3})]
    want = [said(ask(undrafted, prompt, **more)) for prompt, more in asked]
    for running in (fixed, cluster):
        assert [said(ask(running, prompt, **more)) for prompt, more in asked] == want, DAY
        assert [said(answer) for answer in together(running, asked)] == want, DAY
    assert accepted(together(fixed, asked)) > 0
    (prompt, more), first = asked[0], want[0]
    assert said(ask(fixed, prompt, **{**more, "seed": 99}))[0] != first[0]
