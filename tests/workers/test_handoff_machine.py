"""Owner and reader of handoffs in one random world: lost, late and repeated messages, reads that land when they like.

Memory is modelled: a freed owner's region is overwritten, a freed landing place has a new owner whom nothing may
reach. The glue between the pure cores is the least that `prefill/edge.py` and `decode/reader.py` do.
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode.bandwidth import Bandwidth
from decode.core import Event as Heard
from decode.core import Phase as Reading
from decode.core import ReaderTable
from decode.manifest import Held, Manifest, Mine, Opened, Region, Split, StateRegions, check_manifest
from decode.parts import Regions
from engine.worker.timing import Timing
from prefill.core import HandoffTable
from prefill.core import Phase as Owning
from prefill.parts import Announcer
from tests.workers.handoff_model import (
    BLOCK,
    FINGERPRINT,
    LAYOUT,
    POOLS,
    REC,
    SLOT,
    Owner,
    Read,
    Reader,
    cells,
    checksum,
    flat,
    number,
    regions_of,
    rows_of,
    shape_of,
    state_of,
)

TIMING = Timing(transfer_floor_ms=100, transfer_min_bytes_per_s=1_000_000, lease_floor_ms=400)


class Handoffs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = self.made = self.value = 0
        self.owners, self.readers = HandoffTable(TIMING), ReaderTable()
        self.bandwidth = Bandwidth(TIMING)
        self.owned: dict[str, Owner] = {}
        self.reading: dict[str, Reader] = {}
        self.acks: list[tuple[str, int]] = []
        self.freed: list[str] = []
        self.adopted = 0

    def fresh(self) -> int:
        self.value += 1
        return self.value

    # -- the owner ------------------------------------------------------------------------------------------------

    @rule(
        tokens=st.integers(1, 320),
        part=st.sampled_from([1, 1, 300]),
        held=st.integers(0, 2),
        agree=st.booleans(),
    )
    def begin(self, tokens: int, part: int, held: int, agree: bool) -> None:
        """Reserve, open, adopt; the reader may hold some blocks, and the owner may not agree."""
        if len(self.owned) >= 2:
            return
        self.made += 1
        name = f"h{self.made}"
        opened = Opened(
            handoff_id=name, fingerprint=FINGERPRINT, layout=LAYOUT, prompt_tokens=tokens, instance_id="p", epoch=1,
            split=Split(tp_size=1, tp_rank=0, first_head=0, end_head=2), pools=POOLS, fence=self.owners.begin(name),
        )  # fmt: skip
        shape = shape_of(tokens)
        everything = [*rows_of(self.made, shape), *flat(state_of(self.made, 0, 3))]
        memory = {cell: self.fresh() for region in everything for cell in cells(region)}
        self.owned[name] = Owner(opened, Announcer(shape=shape, part_bytes=part), memory)
        count = min(held, tokens // 64)
        name_held = Held(root=b"r" * 16, prefix_hash=b"h" * 16, num_blocks=count) if count else None
        self.readers.reserve(name, prompt_tokens=tokens, nbytes=SLOT, ttl_ms=5_000, now_ms=self.now)
        self.readers.step(name, Heard.OPENED)
        blocks = Regions(LAYOUT, prompt_tokens=tokens, pools=POOLS, held_blocks=count)
        self.reading[name] = Reader(blocks, opened, name_held)
        assert self.owners.follow(name, fence=opened.fence) == "granted"
        if name_held is not None and agree:
            self.owned[name].held = name_held
            self.owned[name].announcer.hold(count)

    def computing(self) -> list[str]:
        return [name for name, owner in self.owned.items() if not owner.ended]

    @precondition(lambda self: self.computing())
    @rule(pick=st.integers(0, 99), tokens=st.integers(1, 100), layers=st.integers(0, 3))
    def compute(self, pick: int, tokens: int, layers: int) -> None:
        """A pass ends: rows become final; in the last one, layers too. What is worth it is announced."""
        name = self.computing()[pick % len(self.computing())]
        owner = self.owned[name]
        shape = owner.announcer.shape
        owner.tokens = min(owner.tokens + tokens, shape.prompt_tokens)
        if owner.tokens == shape.prompt_tokens:
            owner.layers = max(owner.layers, layers)
        changing = rows_of(number(name), shape)[owner.tokens // 64 :]
        if owner.layers < 3:
            changing += flat(state_of(number(name), owner.layers, 3))
        owner.memory.update({cell: self.fresh() for region in changing for cell in cells(region)})
        if blocks := owner.announcer.rows(owner.tokens):
            regions = [self.promised(owner, rows_of(number(name), shape)[b]) for b in blocks]
            owner.log.append((blocks.start, regions))
        if named := owner.announcer.layers(owner.layers):
            owner.state.append(self.promised_state(owner, state_of(number(name), named.start, named.stop)))
            owner.log.append(owner.state[-1])

    @precondition(lambda self: self.computing())
    @rule(pick=st.integers(0, 99))
    def publish(self, pick: int) -> None:
        name = self.computing()[pick % len(self.computing())]
        owner = self.owned[name]
        owner.ended, shape = True, owner.announcer.shape
        first = 0 if owner.held is None else owner.held.num_blocks
        rows = [self.promised(owner, region) for region in rows_of(number(name), shape)[first:]]
        if owner.announcer.next_layer < 3:
            owner.state.append(self.promised_state(owner, state_of(number(name), owner.announcer.next_layer, 3)))
        lease = self.owners.publish(name, nbytes=BLOCK * len(rows) + SLOT, now_ms=self.now)
        if lease is None:
            self.free(name)
            return
        owner.log.append(
            Manifest(
                opened=owner.opened, next_token=1, sampler_position=shape.prompt_tokens + 1, rows=rows,
                state=list(owner.state), held=owner.held, lease_ms=lease.lease_ms,
            )
        )  # fmt: skip

    @precondition(lambda self: self.computing())
    @rule(pick=st.integers(0, 99), chance=st.integers(0, 2))
    def abandon(self, pick: int, chance: int) -> None:
        if chance:
            return
        name = self.computing()[pick % len(self.computing())]
        self.owned[name].ended = True
        self.owned[name].log.append("withdrawn")
        if self.owners.abandon(name, now_ms=self.now):
            self.free(name)

    @precondition(lambda self: self.acks)
    @rule(pick=st.integers(0, 99), how=st.sampled_from(["arrives", "lost", "twice", "stale"]))
    def acknowledge(self, pick: int, how: str) -> None:
        """Acknowledgements come in any order, more than once, or never; old fences free nothing."""
        name, fence = self.acks.pop(pick % len(self.acks))
        if how == "stale":
            assert self.owners.release(name, fence=fence - 1 if fence > 1 else fence + 1000) != "freed"
            self.acks.append((name, fence))
        for _ in range({"arrives": 1, "twice": 2}.get(how, 0)):
            if self.owners.release(name, fence=fence) == "freed":
                self.free(name)

    @rule(ms=st.sampled_from([1, 5, 20, 60, 400]))
    def time_passes(self, ms: int) -> None:
        self.now += ms
        for name in self.owners.expire(self.now):
            self.free(name)
        for name in self.readers.expire(self.now):
            self.reading[name].freed = True
        for name, reader in self.reading.items():
            late = reader.read is not None and reader.read.deadline_ms <= self.now
            if late and self.readers.phase(name) is Reading.PULLING:
                self.readers.step(name, Heard.DEADLINE)

    def free(self, name: str) -> None:
        """The memory gets another use at once. No read that may still run in time is cut off by that."""
        reader, owner = self.reading[name], self.owned.pop(name)
        running = reader.read
        assert running is None or running.deadline_ms <= self.now, "memory reused under a reader"
        assert owner.ended, "memory reused while its sequence writes"
        assert name not in self.freed
        self.freed.append(name)
        for place in owner.memory:
            owner.memory[place] = self.fresh()
        reader.lost = reader.lost or reader.sent < len(owner.log)

    # -- the reader -----------------------------------------------------------------------------------------------

    def live(self) -> list[str]:
        return [n for n, r in self.reading.items() if self.readers.phase(n) in (Reading.FOLLOWING, Reading.PULLING)]

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 99), breaks=st.integers(0, 19))
    def part_comes(self, pick: int, breaks: int) -> None:
        """The next part, or the stream's end. The owner lends what it sends."""
        name = self.live()[pick % len(self.live())]
        reader, owner = self.reading[name], self.owned.get(name)
        if owner is None or not breaks:
            reader.lost = True
        elif reader.sent < len(owner.log) and not reader.lost:
            part = owner.log[reader.sent]
            reader.sent += 1
            reader.refused = reader.refused or not self.heard(name, reader, part)
        self.settle(name)

    def heard(self, name: str, reader: Reader, part: object) -> bool:
        match part:
            case Manifest():
                mine = Mine(
                    fingerprint=FINGERPRINT, layout=LAYOUT, vocab_size=9, epochs={},
                    prompt_tokens=self.readers.prompt_tokens(name),
                )  # fmt: skip
                refusal = check_manifest(part, reader.opened, mine, reader.held) or reader.regions.close(part)
                assert refusal is None or refusal.reason == "held"
                return refusal is None
            case StateRegions():
                if self.owners.lend(name, nbytes=REC):
                    assert reader.regions.state(part) is None
            case (first, regions):
                if self.owners.lend(name, nbytes=BLOCK * len(regions)):
                    refusal = reader.regions.rows(first, regions)
                    assert refusal is None or refusal.reason == "held"
                    return refusal is None
            case _:
                return False
        return True

    def settle(self, name: str) -> None:
        """What the reader does next: give up, read, adopt."""
        reader = self.reading[name]
        if self.readers.phase(name) is not Reading.FOLLOWING:
            return
        if reader.refused or (reader.lost and not reader.regions.closed):
            self.move(name, Heard.REFUSED)
            return
        if wanted := reader.regions.take():
            self.readers.step(name, Heard.READ_STARTED)
            places = [cell for region in regions_of(wanted) for cell in cells(region)]
            deadline = self.now + self.bandwidth.read_ms(("p", 1), wanted.nbytes)
            reader.read = Read(wanted, deadline, places, name)
        elif reader.regions.complete:
            self.move(name, Heard.COMPLETE)
            self.acks.append((name, reader.opened.fence))
            self.adopted += 1

    def pending(self) -> list[str]:
        return [name for name, reader in self.reading.items() if reader.read is not None]

    @precondition(lambda self: self.pending())
    @rule(pick=st.integers(0, 99), pieces=st.integers(1, 9), fails=st.integers(0, 19))
    def bytes_land(self, pick: int, pieces: int, fails: int) -> None:
        """Some regions land, whatever is at their source now; then the read may be over, or may fail."""
        name = self.pending()[pick % len(self.pending())]
        reader = self.reading[name]
        read = reader.read
        assert read is not None
        for _ in range(min(pieces, len(read.places))):
            place = read.places.pop()
            assert not reader.freed, "a late read reached memory that has a new owner"
            owner = self.owned.get(name)
            reader.buffer[place] = read.landed[place] = owner.memory[place] if owner else self.fresh()
        if read.places and fails:
            return
        whole, reader.read = not read.places, None
        good = whole and all(checksum(read.landed, r) == r.xxh3 for r in regions_of(read.wanted))
        if self.readers.phase(name) is Reading.QUARANTINED:
            self.move(name, Heard.READ_ENDED)
            return
        self.readers.step(name, Heard.READ_ENDED)
        if not good or self.now > read.deadline_ms:
            self.move(name, Heard.REFUSED)
            return
        reader.regions.verified()
        self.settle(name)

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 99), chance=st.integers(0, 9))
    def caller_goes(self, pick: int, chance: int) -> None:
        if not chance:
            self.move(self.live()[pick % len(self.live())], Heard.CANCELLED)

    @rule(pick=st.integers(0, 99))
    def turn_ends(self, pick: int) -> None:
        adopted = [name for name in self.reading if self.readers.phase(name) is Reading.ADOPTED]
        if adopted:
            self.move(adopted[pick % len(adopted)], Heard.FINISHED)

    def move(self, name: str, event: Heard) -> None:
        """Step; where that released it the memory gets a new owner, and the handoff's owner is told."""
        reader = self.reading[name]
        if event is Heard.COMPLETE:
            self.check_adopted(name, reader)
        if self.readers.step(name, event) is Reading.RELEASED:
            reader.freed = True
            if event is not Heard.FINISHED:
                self.acks.append((name, reader.opened.fence))

    def check_adopted(self, name: str, reader: Reader) -> None:
        """Every byte that decoding would use is the one that prefill promised, and was final."""
        shape = shape_of(reader.opened.prompt_tokens)
        first = 0 if reader.held is None else reader.held.num_blocks
        needed = [*rows_of(number(name), shape)[first:], *flat(state_of(number(name), 0, 3))]
        for cell in (cell for region in needed for cell in cells(region)):
            assert cell in reader.buffer, "a region was never read"
            assert name not in self.owned or reader.buffer[cell] == self.owned[name].memory[cell]

    # -- many steps at once ---------------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 2**32))
    def busy(self, seed: int) -> None:
        """Forty ordinary steps: hypothesis alone switches whole kinds of rules off and seldom gets far."""
        rng = random.Random(seed)
        for _ in range(40):
            pick, act = rng.randrange(100), rng.choices("bcpnlkt", (2, 5, 1, 8, 8, 2, 2))[0]
            match act:
                case "b":
                    self.begin(
                        rng.randint(1, 320), rng.choice((1, 1, 300)), rng.choice((0, 0, 1)), rng.random() < 0.8
                    )
                case "c" if self.computing():
                    self.compute(pick, rng.randint(1, 100), rng.randint(0, 3))
                case "p" if self.computing():
                    self.publish(pick) if rng.random() < 0.8 else self.abandon(pick, 0)
                case "n" if self.live():
                    self.part_comes(pick, rng.randint(0, 40))
                case "l" if self.pending():
                    self.bytes_land(pick, rng.randint(1, 6), rng.randint(0, 40))
                case "k" if self.acks:
                    self.acknowledge(pick, rng.choice(("arrives", "arrives", "lost", "twice", "stale")))
                case "t":
                    self.time_passes(rng.choice((1, 5, 20, 150)))
                    self.turn_ends(pick)
            self.books_balance()

    # -- always ---------------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        self.owners.check()
        self.readers.check()
        assert len(self.owners) == len(self.owned)
        for name in self.owned:
            assert self.owners.phase(name) is not Owning.FREED

    def teardown(self) -> None:
        """Everything heals: every read ends, every request ends, time passes; then nothing is held."""
        for name in list(self.live()):
            self.move(name, Heard.CANCELLED)
        for name in self.pending():
            self.reading[name].read = None
            self.move(name, Heard.READ_ENDED)
        for name in list(self.reading):
            if self.readers.phase(name) is Reading.ADOPTED:
                self.move(name, Heard.FINISHED)
        for name in self.computing():
            self.owned[name].ended = True
            if self.owners.abandon(name, now_ms=self.now):
                self.free(name)
        for name in self.owners.expire(self.now + 10**6):
            self.now += 10**6
            self.free(name)
        assert len(self.owners) == len(self.readers) == 0
        assert len(self.freed) == self.made

    def promised(self, owner: Owner, region: Region) -> Region:
        return replace(region, xxh3=checksum(owner.memory, region))

    def promised_state(self, owner: Owner, part: StateRegions) -> StateRegions:
        return replace(part, recurrent=self.promised(owner, part.recurrent), conv=self.promised(owner, part.conv))


Handoffs.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestHandoffs = Handoffs.TestCase
