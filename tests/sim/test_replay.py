"""`moonrelay replay`: traces are checked, the cores agree with simpler models, and the policy earns its keep."""

from __future__ import annotations

import json

import pytest

from moonrelay.cli import main
from sim.replay_books import Books
from sim.replay_bounds import foresight_tokens, ideal_tokens
from sim.replay_cores import Cache, Sizes
from sim.traces import Request, read, tool_loops

K3 = Sizes(row_bytes=27_648, snapshot_bytes=449_372_160, block_tokens=512)
GOOD = {"timestamp": 5, "input_length": 1_030, "output_length": 9, "hash_ids": [1, 2, 3]}


@pytest.fixture(scope="module")
def loops() -> list[Request]:
    """Tighter in time than they come, so that a small cache is under pressure."""
    return tool_loops(3, num_requests=1_200)


def lines(tmp_path, *found):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in found))
    return path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{\n", "expected a JSON object"),
        ("[1]\n", "expected a JSON object, found list"),
        ({k: v for k, v in GOOD.items() if k != "hash_ids"}, "hash_ids: expected"),
        (GOOD | {"timestamp": 4}, "timestamp: expected at least 5"),
        (GOOD | {"timestamp": "6"}, "timestamp: expected an integer of at least 0, found '6'"),
        (GOOD | {"input_length": 0}, "input_length: expected an integer of at least 1"),
        (GOOD | {"output_length": -1}, "output_length: expected an integer of at least 0"),
        (GOOD | {"hash_ids": [1, 2]}, "hash_ids: expected 3 for 1030 tokens in blocks of 512, found 2"),
        (GOOD | {"hash_ids": [1, 2, None]}, "hash_ids: expected an integer of at least 0, found None"),
        (GOOD | {"hash_ids": 7}, "hash_ids: expected a list of integers, found int"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path, capsys, line, expected):
    path = lines(tmp_path, GOOD, line)
    assert main(["replay", str(path), "--budget-tb", "1"]) == 2
    error = capsys.readouterr().err
    assert "line 2" in error and expected in error


def test_an_empty_or_missing_trace_is_refused(tmp_path, capsys):
    assert main(["replay", str(lines(tmp_path))]) == 2
    assert "expected at least one request" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["replay", "tool-loops", "--budget-tb", "0"])
    assert left.value.code == 2


def test_an_id_behind_two_different_ones_is_two_blocks(tmp_path):
    path = lines(
        tmp_path, GOOD | {"hash_ids": [1, 7, 3]}, GOOD | {"hash_ids": [2, 7, 3]}, GOOD | {"hash_ids": [1, 7, 4]}
    )
    first, second, third = (request.blocks for request in read(path, 512))
    assert first == third and not set(first) & set(second)


def test_the_last_line_is_one_object_and_the_numbers_are_in_order(tmp_path, capsys):
    numbers = range(24)
    ids = [[0, 1 + i // 4, 50 + i // 2, 99 + i] for i in numbers]
    trace = [GOOD | {"timestamp": 100 * i, "input_length": 1_537 + i, "hash_ids": ids[i]} for i in numbers]
    plot = tmp_path / "plot.svg"
    arguments = ["--budget-tb", "0.01", "1", "--json", "--jobs", "1", "--plot", str(plot)]
    assert main(["replay", str(lines(tmp_path, *trace)), *arguments]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["token_hit_rate"] == found["rows"][0]["token_hit_rate"] and found["requests"] == 24
    assert 0 < found["token_hit_rate"] <= found["offline_bound"] <= found["ideal"]
    assert {row["budget_tb"] for row in found["rows"]} == {0.01, 1.0}
    assert plot.read_text().count("<rect") == 1 + len(found["rows"])


def test_a_cache_that_is_large_enough_gives_what_a_dictionary_of_snapshots_gives(loops):
    """Ends and branch points alone, against a model that is a few lines long."""
    cache, seen, cuts = Cache(K3, 10**16, "worth", "end+branch"), set(), set()
    for request in loops:
        usable = request.blocks[: (request.prompt_tokens - 1) // 512]
        known = next((i for i, block in enumerate(usable) if block not in seen), len(usable))
        hit = max((i for i, block in enumerate(usable[:known], 1) if block in cuts), default=0)
        assert cache.serve(request) == hit * 512
        cuts.update(usable[depth - 1] for depth in (known, len(usable)) if depth > hit)
        seen.update(request.blocks)
    cache.check()


@pytest.mark.parametrize("policy", ["worth", "lru"])
def test_the_whole_cores_and_the_books_agree(loops, policy):
    whole, books = (kind(K3, 2 * 10**10, policy, "planner") for kind in (Cache, Books))
    given = [(whole.serve(request), books.serve(request)) for request in loops]
    assert all(a == b for a, b in given) and sum(a for a, _ in given) > 0
    whole.check()
    books.check()


def test_it_does_not_lose_to_lru_and_nobody_exceeds_the_bounds(loops):
    for budget_bytes in (10**10, 10**11):
        hits = {
            policy: sum(map(Books(K3, budget_bytes, policy, places).serve, loops))
            for policy, places in (("worth", "planner"), ("lru", "end+branch"))
        }
        bound, ideal = foresight_tokens(loops, K3, budget_bytes), ideal_tokens(loops, 512)
        assert hits["lru"] <= hits["worth"] <= bound <= ideal


def test_a_shared_prefix_that_nobody_hinted_at_hits_at_the_third_sighting():
    cache = Cache(K3, 10**12, "worth", "planner")
    hits = []
    for i in range(4):
        blocks = (0, 1, 2, *range(10 * i + 10, 10 * i + 16))
        request = Request(time_ms=1_000 * i, prompt_tokens=9 * 512 + 5, output_tokens=1, blocks=blocks)
        hits.append(cache.serve(request))
    assert hits == [0, 0, 3 * 512, 3 * 512]


def test_equal_seeds_make_equal_traces():
    assert tool_loops(1, num_requests=50) == tool_loops(1, num_requests=50) != tool_loops(2, num_requests=50)
