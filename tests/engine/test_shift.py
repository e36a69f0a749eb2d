"""Bias and penalties: a verified token meets the bits that it would meet without a draft, and so after a handoff."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from toy import VOCAB, alone, finish, quiet_engine, start

from engine.api import SamplingParams
from engine.shift import Shift
from engine.worker.wire import after_first_token

PENALTIES = st.floats(-2.0, 2.0, width=32)
IDS = st.lists(st.integers(0, 9), max_size=12)


@given(PENALTIES, PENALTIES, st.dictionaries(st.integers(0, 9), st.floats(-100, 100, width=32)), IDS, IDS, IDS)
def test_a_drafted_row_has_the_bits_of_its_own_step(presence, frequency, bias, generated, drawn, drafted):
    params = SamplingParams(
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias.items()),
        generated=tuple(generated),
    )
    logits = np.random.default_rng(len(drafted)).normal(0.0, 3.0, (len(drafted) + 1, 10)).astype(np.float32)
    heard: list[int] = []
    shift = Shift(params, heard)
    for token in drawn:
        shift.apply(logits[:1], ())
        heard.append(token)
    together = shift.apply(logits, drafted)
    for row in range(len(drafted) + 1):
        said = [*drawn, *drafted[:row]]
        assert (together[row] == Shift(params, said).apply(logits[row : row + 1], ())[0]).all()
        counts = np.bincount([*generated, *said], minlength=10)
        exact = logits[row].astype(float) - presence * (counts > 0) - frequency * counts
        exact[list(bias)] += list(bias.values())
        np.testing.assert_allclose(together[row], exact, rtol=1e-5, atol=1e-4)
    assert (shift.apply(logits, drafted) == together).all()


def test_a_sequence_goes_on_from_its_first_token_as_if_it_had_drawn_it_itself():
    ids = [(i * 5) % VOCAB for i in range(70)]
    for more in ({}, {"temperature": 1.0, "seed": 5}):
        params = SamplingParams(max_tokens=40, presence_penalty=0.5, frequency_penalty=2.0, **more)
        want = [token.id for token in alone(ids, params)]
        assert want != [token.id for token in alone(ids, SamplingParams(max_tokens=40, **more))]
        engine = quiet_engine()
        client, _ = start(engine, [*ids, want[0]], after_first_token(params, want[0]))
        finish(engine)
        assert [token.id for token in client.tokens] == want[1:]
        forgetful, _ = start(engine, [*ids, want[0]], replace(params, max_tokens=39))
        finish(engine)
        assert [token.id for token in forgetful.tokens] != want[1:]
