"""Drafter training: samples, batches, a run alone, and the run as Ray actors of which some are killed."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.verify import verify
from model.config import load_config
from model.drafter.network import load_drafter
from tests.golden import golden_dir
from train import draft_data, draft_eval, draft_trainer
from train.draft_data import GeneratorSettings, Sample
from train.draft_network import W1, W2
from train.draft_prompts import Prompt, prose_of
from train.draft_roles import DrafterSizes, DraftSettings, GeneratorRole, TrainerRole, load_target, mean_state
from train.draft_run import CURVE_FILE, EXPORT, LOG_FILE, STATE_FILE, Journal, run_alone
from train.draft_trainer import Replay, TrainerSettings

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="there is no C++ compiler"
)
MODEL = "k3_tiny_smooth"
STOP, MASK = 3, 5
LAYERS = (1, 3)


@dataclass(frozen=True)
class RandomPrompts:
    """Token ids without a meaning: the golden models have no vocabulary."""

    kind: str = "code"

    def __call__(self, seed: int) -> Iterator[Prompt]:
        rng = np.random.default_rng(seed)
        while True:
            yield Prompt(kind=self.kind, ids=rng.integers(10, 200, rng.integers(5, 30)).tolist())


def settings(folder: Path) -> DraftSettings:
    return DraftSettings(
        model_dir=golden_dir(MODEL),
        folder=folder,
        stop=STOP,
        mask_id=MASK,
        sizes=DrafterSizes(
            target_layers=LAYERS, layers=1, intermediate=32, heads=2, q_lora=16, kv_lora=16, nope=8, rope=32, v_dim=8,
            markov_rank=8, block_len=4,
        ),
        generator=GeneratorSettings(target_layers=LAYERS, batch=4, tokens_min=8, tokens_max=16, context_max=64),
        trainer=TrainerSettings(samples=4, anchors=6),
        batch_samples=4,
        fill=8,
        round_steps=2,
    )  # fmt: skip


@pytest.fixture(params=[False, True], ids=["", "prompts too"])
def samples(tmp_path: Path, keep_threads: None, request: pytest.FixtureRequest) -> list[Sample]:
    own = settings(tmp_path)
    own = replace(own, generator=replace(own.generator, prompts_too=request.param))
    return GeneratorRole(own, RandomPrompts(), 1).produce(18 if request.param else 12)[1]


def test_a_prompt_is_a_sample_where_its_laws_are_kept(samples: list[Sample], request: pytest.FixtureRequest) -> None:
    """Up to where greedy text begins, which is another one; drawn text goes on from it."""
    starts = {s.prompt == 1 for s in samples if not s.greedy}
    assert starts == {"prompts too" in request.node.name}
    for before, greedy in itertools.pairwise(samples):
        if greedy.greedy and "prompts too" in request.node.name:
            assert not before.greedy and before.prompt == 1 and len(before.ids) == greedy.prompt
            np.testing.assert_array_equal(before.ids, greedy.ids[: greedy.prompt])


class Clock:
    """A minute passes whenever anybody looks at it a few times."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 10.0
        return self.now_s


class Stopped(Clock):
    """Time passes where a test says so."""

    def __call__(self) -> float:
        return self.now_s


def test_a_sample_holds_what_stepping_gives(samples: list[Sample], tmp_path: Path) -> None:
    """Taps and laws of a batch that comes and goes, its prompts' too, against one pass over each whole text."""
    target = load_target(settings(tmp_path))
    target.tap(LAYERS)
    layout = target.layout(64)
    assert any(s.greedy for s in samples) and not all(s.greedy for s in samples)
    for s in samples:
        ids = s.ids.astype(int).tolist()
        taps = torch.empty(len(ids) - 1, len(LAYERS), target.config.hidden_size)
        rows, state = torch.zeros(1, layout.block_floats), torch.zeros(1, layout.slot_floats)
        segment = draft_data.Segment(ids=ids[:-1], start=0, slot=0, blocks=[0], logits="all")
        logs = target.forward([segment], rows, state, taps=taps).log_softmax(-1)[s.prompt - 1 :]
        laws = torch.nn.functional.linear(torch.from_numpy(s.states).float(), target.lm_head.float()).log_softmax(-1)
        np.testing.assert_array_equal(taps.numpy().astype(np.float16), s.taps)
        torch.testing.assert_close(laws, logs, rtol=0, atol=2e-2)
        np.testing.assert_array_equal(logs.topk(draft_data.TOP).indices.numpy(), s.likeliest)
        if s.greedy:
            assert ids[s.prompt :] == logs.argmax(-1).tolist()


def test_some_text_goes_on_behind_an_end(tmp_path: Path, keep_threads: None) -> None:
    own = settings(tmp_path)
    written = [s.ids[s.prompt :].tolist() for s in GeneratorRole(own, RandomPrompts(), 1).produce(12)[1]]
    ids = list(itertools.chain.from_iterable(written))
    own = replace(own, stop=max(ids, key=ids.count))
    for share in (0.0, 1.0):
        going_on = replace(own, generator=replace(own.generator, past_end_share=share))
        made = GeneratorRole(going_on, RandomPrompts(), 1).produce(12)[1]
        assert any(own.stop in s.ids[s.prompt : -1] for s in made) == (share == 1.0)


def test_matches_are_counted_as_a_look_into_the_text_finds_them(samples: list[Sample]) -> None:
    assert draft_data.matches([1, 2, 3, 1, 2, 3, 9, 9]).tolist() == [0, 0, 0, 1, 2, 3, 0, 1]
    for s in samples:
        ids = s.ids.astype(int).tolist()
        for i in range(s.prompt, len(ids)):
            longest = 0
            for size in range(1, draft_data.MATCH_MAX + 1):
                end = ids[i + 1 - size : i + 1]
                if len(end) == size and any(ids[j : j + size] == end for j in range(i + 1 - size)):
                    longest = size
            assert s.matched[i - s.prompt] == longest


def test_samples_come_back_from_disk(samples: list[Sample], tmp_path: Path) -> None:
    draft_data.save(samples, tmp_path / "shard.npz")
    for mine, stored in zip(samples, draft_data.load(tmp_path / "shard.npz"), strict=True):
        assert (mine.kind, mine.greedy, mine.prompt) == (stored.kind, stored.greedy, stored.prompt)
        for name in ("ids", "taps", "states", "likeliest", "matched"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(stored, name))


def test_a_batch_lines_tokens_up_with_their_laws(samples: list[Sample]) -> None:
    slots = 3
    batch = draft_trainer.collate(samples, 50, slots, np.random.default_rng(0))
    seen = 0
    for row, s in enumerate(samples):
        for column in range(50):
            place = int(batch.places[row, column])
            assert batch.ids[row, column] == s.ids[place]
            for slot in range(slots):
                if batch.weights[row, column, slot] == 0:
                    continue
                seen += 1
                law = place + slot + 1 - s.prompt  # what the token behind the slot's was chosen from
                assert batch.before[row, column, slot] == s.ids[place + slot]
                np.testing.assert_array_equal(batch.likeliest[row, column, slot].numpy(), s.likeliest[law])
                np.testing.assert_array_equal(batch.states[row, column, slot].numpy(), s.states[law])
                if s.greedy:
                    assert s.likeliest[law][0] == s.ids[place + slot + 1]
    assert seen > 100


def test_the_replay_forgets_the_oldest(samples: list[Sample]) -> None:
    replay = Replay(5, 0)
    for sample in samples:
        replay.add(sample)
    assert len(replay) == 5
    drawn = list(itertools.chain.from_iterable(replay.draw(5) for _ in range(20)))
    assert {id(sample) for sample in drawn} <= {id(sample) for sample in samples[-5:]}


def test_the_walk_counts_tokens_a_step(samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is always right, one that never is, and one that the text itself replaces."""
    sample = replace(samples[0], greedy=True, ids=np.arange(40, dtype=np.uint16) + 20, prompt=4)
    for kept, want in ((3, 4.0), (0, 1.0)):
        likely = np.tile(np.arange(3) < kept, (33, 1)).astype(np.float32)
        monkeypatch.setattr(draft_eval, "chances", lambda *_, likely=likely: likely)
        found = draft_eval.acceptance(None, {}, torch.empty(0), [sample], 3)  # type: ignore[arg-type]
        assert (found.tokens_per_step, found.looped_share) == (want, 0.0)
    ids = [*range(20, 40), *range(20, 40)]
    repeated = replace(sample, ids=np.array(ids, np.uint16), prompt=20)
    monkeypatch.setattr(draft_eval, "chances", lambda *_: np.zeros((17, 3), np.float32))
    alone = draft_eval.acceptance(None, {}, torch.empty(0), [repeated], 3, lookup=False)  # type: ignore[arg-type]
    both = draft_eval.acceptance(None, {}, torch.empty(0), [repeated], 3)  # type: ignore[arg-type]
    assert alone.tokens_per_step == 1.0 < both.tokens_per_step
    assert draft_eval.copied(ids, 25, 3, True) == 3 and draft_eval.copied(ids, 5, 3, True) is None
    assert draft_eval.copied(ids, 22, 3, True) == 3 and draft_eval.copied(ids, 22, 3, False) is None


def test_chances_are_what_verification_keeps() -> None:
    """The mean over all texts that the target may draw, against verifying drafts that the drafter draws."""
    rng, slots, vocab, count = np.random.default_rng(0), 3, 4, 4_000
    target, draft = (rng.dirichlet(np.ones(vocab), slots) for _ in range(2))
    accepted = []
    for _ in range(count):
        tokens = (draft.cumsum(1) < rng.random((slots, 1))).sum(1)
        verdict = verify("block", np.concatenate([target, target[:1]]), draft, tokens, rng.random(slots))
        accepted.append(verdict.accepted)
    network = SimpleNamespace(hidden=lambda _p, _t, _i, places, _s: torch.from_numpy(draft).log().float()[None, None])
    params = {W1: torch.zeros(vocab, 1), W2: torch.zeros(vocab, 1)}
    mean = np.zeros(slots)
    for text in itertools.product(range(vocab), repeat=slots):
        sample = Sample(
            kind="code", greedy=False, prompt=0, ids=np.array([0, *text], np.uint16),
            taps=np.zeros((slots, 1, 1), np.float16), likeliest=np.zeros((slots + 1, 1), np.uint16),
            states=np.concatenate([np.zeros((1, vocab)), np.log(target)]).astype(np.float16),
            matched=np.zeros(slots + 1, np.uint8),
        )  # fmt: skip
        likely = draft_eval.chances(network, params, torch.eye(vocab), sample, slots)[0]  # type: ignore[arg-type]
        assert np.all(np.diff(likely) <= 0)
        mean += likely * np.prod(target[np.arange(slots), text])
    kept = [np.mean(np.array(accepted) > slot) for slot in range(slots)]
    np.testing.assert_allclose(mean, kept, atol=0.03)


def test_training_lowers_the_loss_and_the_drafter_loads(samples: list[Sample], tmp_path: Path) -> None:
    torch.manual_seed(0)
    role = TrainerRole(replace(settings(tmp_path), round_steps=12), 0)
    first, state = role.learn(0.0, samples)
    assert state is not None
    last, _ = role.learn(0.5, [])
    assert last["loss"] < first["loss"] and last["overlap"] > first["overlap"]
    role.save(tmp_path / STATE_FILE, tmp_path / EXPORT)
    again = TrainerRole(settings(tmp_path), 0)
    assert again.restore(tmp_path / STATE_FILE) == role.step() == 24
    target = load_target(settings(tmp_path))
    loaded = load_drafter(tmp_path / EXPORT, load_config(golden_dir(MODEL)), target.embedding, target.lm_head)
    assert (loaded.config.block_len, loaded.config.target_layers) == (4, LAYERS)
    both = mean_state([state, again._trainer.state()])
    name = "context_proj.weight"
    want = (state["params"][name] + again._trainer.params[name].detach()) / 2
    torch.testing.assert_close(both["params"][name], want)


def test_a_run_alone_goes_on_where_it_stopped(tmp_path: Path, keep_threads: None) -> None:
    shown: list[str] = []
    held_out = draft_eval.continuations(load_target(settings(tmp_path)), list(_prompts(2)), LAYERS, 12, STOP)
    for minutes in (6.0, 12.0):
        clock = Clock()
        run_alone(settings(tmp_path), RandomPrompts(), held_out, Journal(tmp_path, minutes, clock), shown.append)
    records = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    steps = [record["step"] for record in records if "step" in record]
    assert steps == sorted(set(steps)) and len(steps) > 4
    assert records[-1]["held_out_code"] >= 1.0 and "code" in shown[-1]
    assert (tmp_path / CURVE_FILE).read_text().startswith("<svg") and (tmp_path / EXPORT / "config.json").exists()


def _prompts(count: int) -> Iterator[Prompt]:
    return itertools.islice(RandomPrompts()(7), count)


def test_prose_leaves_examples_out() -> None:
    code = f'''def f():
    """{"A sentence that goes on for long enough to be prose, and says what the function does. " * 2}

    >>> f()

    The end.
    """
'''
    assert ">>>" not in prose_of(code) and prose_of(code).endswith("The end.")


def test_killed_actors_are_replaced_and_the_run_goes_on(
    tmp_path: Path, keep_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator and, later, the only trainer die in mid-run: steps go on from the last round, nothing is lost."""
    ray = pytest.importorskip("ray", reason="Ray is in the train extra")
    from train.draft_ray import Fleet, Pipeline, connect

    monkeypatch.setenv("RAY_worker_niceness", "0")  # its default of 15 starves beside other tests
    fleet = Fleet(generators=2, trainers=1, queue_max=2)
    connect(fleet)
    try:
        clock = Stopped()
        killed: list[str] = []

        def after_round(pipeline: Pipeline) -> None:
            clock.now_s += 60.0
            for number, seats in ((3, pipeline.generators), (6, pipeline.trainers)):
                if int(clock.now_s) // 60 == number:
                    killed.append(seats[0].role)
                    ray.kill(seats[0].actor)

        journal = Journal(tmp_path, 14.0, clock)
        Pipeline(settings(tmp_path), fleet, RandomPrompts(), journal, lambda _: None).run(
            list(_prompts(2)), after_round
        )
    finally:
        ray.shutdown()
    records = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert killed == ["generator", "trainer"]
    assert max(record["restarts"] for record in records if "restarts" in record) == 2
    steps = [record["step"] for record in records if "step" in record]
    assert len(steps) > 5 and steps == sorted(steps), "a new trainer takes over the last round's state"
    assert max(record["queued"] for record in records if "queued" in record) <= fleet.queue_max
    assert records[-1]["held_out_code"] >= 1.0
    assert (tmp_path / EXPORT / "model.safetensors").exists()


def test_the_cluster_file_seats_every_actor() -> None:
    yaml = pytest.importorskip("yaml", reason="Ray brings it")
    from train.draft_ray import ROLES

    path = Path(__file__).parents[2] / "deploy" / "k8s" / "drafter-training.yaml"
    groups = yaml.safe_load(path.read_text())["spec"]["workerGroupSpecs"]
    seats = {
        role: group["replicas"] * number
        for group in groups
        for role, number in json.loads(json.loads(group["rayStartParams"]["resources"])).items()
    }
    assert seats == dict(zip(ROLES, (28, 4), strict=True))
