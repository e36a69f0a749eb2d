"""What `test_handoff_machine` models: owners' and readers' memory, region by region."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode.manifest import Held, Opened, Region, StateRegions
from decode.parts import Regions, Wanted
from model.batch import PoolLayout
from moonrelay.prefix import Fingerprint
from prefill.parts import Announcer, HandoffShape

LAYOUT = PoolLayout(
    block_tokens=64, num_mla_layers=1, row_width=1, num_kda_layers=3, num_heads=2, key_dim=2, value_dim=2,
    conv_history=1,
)  # fmt: skip
BLOCK, REC, CONV = 256, 32, 48  # bytes of a block, of a layer's recurrent state and conv history
SLOT = 3 * (REC + CONV)
POOLS = {0: 40 * BLOCK, 1: 8 * SLOT}
FINGERPRINT = Fingerprint(
    model="m", weights_revision="w", tokenizer_revision="t", row_dtype="float32", snapshot_dtype="float32",
    layout_version="1", numerics_version="n", block_tokens=64,
)  # fmt: skip
Place = tuple[int, int]  # pool, offset


@dataclass
class Owner:
    """One handoff on the prefill side. `memory`: what lies at each place; a final region's value is its promise."""

    opened: Opened
    announcer: Announcer
    memory: dict[Place, int]
    tokens: int = 0
    layers: int = 0
    ended: bool = False
    log: list[object] = field(default_factory=list)
    state: list[StateRegions] = field(default_factory=list)
    rows_said: int = 0
    held: Held | None = None
    followed: bool = False


@dataclass
class Read:
    wanted: Wanted
    deadline_ms: int
    places: list[Place]  # still to land
    owner: str
    landed: dict[Place, int] = field(default_factory=dict)


@dataclass
class Reader:
    regions: Regions
    opened: Opened
    held: Held | None
    sent: int = 0  # of the owner's log
    lost: bool = False  # the stream broke
    refused: bool = False
    read: Read | None = None
    buffer: dict[Place, int] = field(default_factory=dict)
    freed: bool = False


def number(name: str) -> int:
    return int(name[1:])


def shape_of(tokens: int) -> HandoffShape:
    return HandoffShape(
        block_tokens=64, prompt_tokens=tokens, block_bytes=BLOCK, num_layers=3, layer_bytes=REC + CONV
    )  # fmt: skip


def cells(region: Region) -> list[Place]:
    """What changes alone: a block, one layer's recurrent state, one layer's conv history."""
    step = BLOCK if region.pool == 0 else REC if region.offset % SLOT < 3 * REC else CONV
    return [(region.pool, region.offset + at) for at in range(0, region.length, step)]


def checksum(memory: dict[Place, int], region: Region) -> int:
    return hash(tuple(memory[cell] for cell in cells(region)))


def regions_of(wanted: Wanted) -> list[Region]:
    return [*(region for _, region in wanted.rows), *(region for part in wanted.state for region in flat(part))]


def rows_of(made: int, shape: HandoffShape) -> list[Region]:
    base = made % 6 * 6
    return [Region(pool=0, offset=(base + i) * BLOCK, length=BLOCK, xxh3=0) for i in range(shape.num_blocks)]


def state_of(made: int, first: int, end: int) -> StateRegions:
    slot, count = made % 8 * SLOT, end - first
    return StateRegions(
        first_layer=first,
        end_layer=end,
        recurrent=Region(pool=1, offset=slot + first * REC, length=count * REC, xxh3=0),
        conv=Region(pool=1, offset=slot + 3 * REC + first * CONV, length=count * CONV, xxh3=0),
    )


def flat(part: StateRegions) -> list[Region]:
    return [part.recurrent, part.conv]
