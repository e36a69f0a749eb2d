"""Rejection sampling against the golden cases, and the law it must not change."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.verify import Rule, Verdict, verify
from tests.golden import golden_dir

RULES: tuple[Rule, ...] = ("standard", "block")


def golden() -> Any:
    return json.loads((golden_dir("spec") / "cases.json").read_text())


def judge(rule: Rule, case: dict[str, Any]) -> Verdict:
    laws = np.asarray(case["target_probs"]), np.asarray(case["draft_probs"])
    return verify(rule, *laws, np.asarray(case["draft_tokens"], dtype=np.intp), np.asarray(case["uniforms"]))


@pytest.mark.parametrize("rule", RULES)
def test_golden_cases(rule):
    cases = golden()["cases"]
    assert len(cases) == 31
    for case in cases:
        expected, found = case[rule], judge(rule, case)
        assert found.accepted == expected["accepted"], case["name"]
        np.testing.assert_allclose(found.law, expected["next_distribution"], atol=1e-12, err_msg=case["name"])
        drawn = int(np.searchsorted(np.cumsum(found.law), expected["final_uniform"], side="right"))
        assert drawn == expected["next_token_inverse_cdf"], case["name"]


def accept_sets(rule: Rule, target: Any, draft: Any, tokens: Any) -> list[tuple[float, Verdict]]:
    """Every outcome over the uniforms, with its weight: outcomes change only at thresholds, found by bisection."""
    k = len(tokens)
    axes = []
    for i in range(k):
        low, high = 0.0, 1.0

        def keeps(u: float, i: int = i) -> bool:
            uniforms = np.ones(k) - 1e-16
            uniforms[:i] = 0.0 if rule == "standard" else uniforms[:i]
            uniforms[i] = u
            return verify(rule, target, draft, tokens, uniforms).accepted > i

        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if keeps(middle) else (low, middle)
        axes.append(((low / 2, low), ((1 + high) / 2, 1 - high)))
    outcomes = []
    for points in itertools.product(*axes):
        weight = float(np.prod([w for _, w in points]))
        if weight > 0:
            outcomes.append((weight, verify(rule, target, draft, tokens, np.array([u for u, _ in points]))))
    return outcomes


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("index", [0, 1])
def test_the_joint_law_of_a_tree_is_the_targets(rule, index):
    """Two drafted tokens and the one after them, summed over all drafts and all uniforms, in exact context trees."""
    tree = golden()["trees"][index]
    vocab, k = tree["vocab"], tree["num_draft"]
    target = {key: np.asarray(law) for key, law in tree["target"].items()}
    draft = {key: np.asarray(law) for key, law in tree["draft"].items()}

    def context(ids: tuple[int, ...]) -> str:
        return ",".join(map(str, ids))

    joint = np.zeros((vocab,) * (k + 1))
    expected_accepted = 0.0
    for tokens in itertools.product(range(vocab), repeat=k):
        proposed = np.prod([draft[context(tokens[:i])][tokens[i]] for i in range(k)])
        laws = np.stack([target[context(tokens[:i])] for i in range(k + 1)])
        drafts = np.stack([draft[context(tokens[:i])] for i in range(k)])
        for weight, verdict in accept_sets(rule, laws, drafts, np.asarray(tokens, dtype=np.intp)):
            expected_accepted += proposed * weight * verdict.accepted
            for following in range(vocab):
                prefix = (*tokens[: verdict.accepted], following)
                mass = proposed * weight * verdict.law[following]
                for rest in itertools.product(range(vocab), repeat=k + 1 - len(prefix)):
                    whole = (*prefix, *rest)
                    tail = np.prod([target[context(whole[:i])][whole[i]] for i in range(len(prefix), k + 1)])
                    joint[whole] += mass * tail
    truth = np.zeros_like(joint)
    for whole in itertools.product(range(vocab), repeat=k + 1):
        truth[whole] = np.prod([target[context(whole[:i])][whole[i]] for i in range(k + 1)])
    np.testing.assert_allclose(joint, truth, atol=1e-12)
    assert expected_accepted == pytest.approx(tree[f"{rule}_expected_accepted"], abs=1e-12)


@given(seed=st.integers(0, 2**32 - 1), k=st.integers(1, 6), vocab=st.integers(1, 7), rule=st.sampled_from(RULES))
def test_a_verdict_is_a_law_and_never_one_the_target_excludes(seed, k, vocab, rule):
    rng = np.random.default_rng(seed)

    def laws(rows: int) -> Any:
        weights = rng.random((rows, vocab)) ** 4 * (rng.random((rows, vocab)) < 0.7)
        weights[np.arange(rows), rng.integers(vocab, size=rows)] += 0.1
        return weights / weights.sum(axis=1, keepdims=True)

    target, draft = laws(k + 1), laws(k)
    tokens = np.array([rng.choice(vocab, p=law) for law in draft], dtype=np.intp)
    verdict = verify(rule, target, draft, tokens, rng.random(k))
    assert verdict.law.sum() == pytest.approx(1.0)
    assert (verdict.law[target[verdict.accepted] == 0.0] == 0.0).all()
    assert (target[np.arange(verdict.accepted), tokens[: verdict.accepted]] > 0.0).all()


def test_shapes_that_disagree_are_refused():
    with pytest.raises(ValueError, match="need target"):
        verify("block", np.ones((2, 3)), np.ones((2, 3)), np.zeros(2, dtype=np.intp), np.zeros(2))
