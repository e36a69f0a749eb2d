"""Reservations and kept bundles over one ledger, in any order: nothing is lost, kept memory refuses nobody."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.api import EngineStats, Reservation
from engine.ledger import Ledger
from engine.worker.memory import Holding, Memory, Want
from model.batch import PoolLayout
from moonrelay.errors import Overloaded
from moonrelay.prefix import prefix_hashes

ROOTS = (b"a" * 16, b"b" * 16)
PROMPTS = [[1] * 300, [1] * 128 + [2] * 200, [1] * 128 + [3] * 64, [4] * 130, [4] * 64 + [5] * 70]


class LedgerEngine:
    """The engine's books without the engine: sequences end as soon as they are submitted."""

    def __init__(self, *, num_blocks: int, num_slots: int, writeback: str) -> None:
        self.settings = SimpleNamespace(
            block_tokens=64, num_blocks=num_blocks, num_slots=num_slots, writeback=writeback
        )
        layout = PoolLayout(
            block_tokens=64, num_mla_layers=1, row_width=1, num_kda_layers=1, num_heads=1, key_dim=1, value_dim=1,
            conv_history=1,
        )  # fmt: skip
        self.pools = SimpleNamespace(layout=layout)
        self.ledger = Ledger(num_blocks=num_blocks, num_slots=num_slots, block_tokens=64)
        self.release, self.retain, self.drop = self.ledger.release, self.ledger.retain, self.ledger.drop
        self.holders, self.release_snapshot = self.ledger.holders, self.ledger.release_snapshot

    def reserve(self, tokens: int, *, shared=(), write_back: bool = False) -> Reservation:
        rolling = write_back and self.settings.writeback == "on"
        return self.ledger.reserve(tokens, shared=shared, rolling=rolling)

    def holders_of(self, blocks) -> list[int]:
        return [self.ledger.holders(block) for block in blocks]

    def stats(self) -> EngineStats:
        return EngineStats(
            num_blocks=self.ledger.num_blocks, free_blocks=self.ledger.free_blocks, num_slots=self.ledger.num_slots,
            free_slots=self.ledger.free_slots, num_waiting=0, num_running=0, snapshots_skipped=0,
            rolling_slots=self.ledger.rolling_slots,
        )  # fmt: skip


class Worker(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = LedgerEngine(num_blocks=14, num_slots=6, writeback="on")
        self.memory = Memory(self.engine, waiting_max=4, kept_share=0.8)
        self.open: list[tuple[Holding, list[bytes], bytes, int]] = []
        self.contents: dict[bytes, int] = {}  # hash -> the block that was kept under it last

    @rule(
        prompt=st.sampled_from(PROMPTS), root=st.sampled_from(ROOTS), more=st.integers(1, 90), state=st.booleans(),
        write_back=st.booleans(), blocks_min=st.integers(1, 3), copies=st.integers(0, 2),
    )  # fmt: skip
    def reserve(self, prompt, root, more, state, write_back, blocks_min, copies) -> None:
        hashes = prefix_hashes(root, prompt, 64)
        tokens = len(prompt) + more
        want = Want(
            tokens=tokens, write_back=write_back, hashes=hashes[: (len(prompt) - 1) // 64], state=state,
            blocks_min=blocks_min, snapshots=copies,
        )  # fmt: skip
        try:
            holding = self.memory._try(want)
        except Overloaded:
            self.memory.clear()
            try:
                probe = self.engine.ledger.reserve(tokens, rolling=write_back)
            except Overloaded:
                return
            self.engine.release(probe)
            raise AssertionError("refused although kept memory would have made room") from None
        found = holding.found
        assert holding.reservation.shared == (len(found.blocks) if found else 0)
        if found is not None:
            assert len(found.blocks) >= blocks_min and (found.slot is not None) == state
            assert holding.reservation.blocks[: len(found.blocks)] == found.blocks
            assert [self.contents[h] for h in hashes[: len(found.blocks)]] == list(found.blocks)
        self.memory.untake(holding)
        restored = 0 if found is None else 64 * len(found.blocks)
        self.engine.ledger.attach(holding.reservation, restored=restored)
        self.engine.ledger.advance(holding.reservation, start=restored, tokens=len(prompt) - restored)
        self.engine.ledger.detach(holding.reservation)
        self.open.append((holding, hashes, root, len(prompt)))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 20), depths=st.sets(st.integers(1, 5)), short=st.integers(0, 2))
    def keep(self, which: int, depths: set[int], short: int) -> None:
        holding, hashes, root, _ = self.open[which % len(self.open)]
        hashes = hashes[: len(hashes) - short]
        before = self.memory.bundles.depth(hashes)
        snapshots = []
        for depth in sorted(depths):
            slot = self.engine.ledger.take_snapshot() if depth <= len(hashes) else None
            if slot is not None:
                self.memory.own_snapshot(slot)
                snapshots.append((depth, slot))
        for index in range(before, len(hashes)):
            self.contents[hashes[index]] = holding.reservation.blocks[index]
        self.memory.keep(holding, root, hashes, [None] * len(hashes), snapshots)
        for _, slot in snapshots:
            self.memory.drop_snapshot(slot)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 20))
    def drop(self, which: int) -> None:
        self.open.pop(which % len(self.open))[0].drop()

    @invariant()
    def books_balance(self) -> None:
        self.engine.ledger.check()
        self.memory.check()
        assert self.memory.leaked() == self.memory.leaked() == (0, 0)
        assert self.memory.num_held == len(self.open)
        assert self.memory.bundles.num_blocks <= int(0.8 * 14) and self.memory.bundles.num_slots <= int(0.8 * 6)

    def teardown(self) -> None:
        for holding, *_ in self.open:
            holding.drop()
        self.memory.clear()
        assert (self.engine.ledger.free_blocks, self.engine.ledger.free_slots) == (14, 6)


Worker.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestWorker = Worker.TestCase
