"""What a handoff's owner has said so far: its stream of parts, judged one by one into `Regions`."""

from __future__ import annotations

import asyncio
import time

import grpc

from decode.manifest import Held, Mine, Opened, check_manifest, refused
from decode.owners import Parts
from decode.parts import Regions
from decode.wire import manifest_from_wire, region, state_from_wire
from moonrelay.errors import HandoffRefused
from moonrelay.stubs.v1 import worker_pb2


class Inbox:
    """Filled by `collect` or `take`; `changed` is set at every part and at the end."""

    def __init__(self, opened: Opened, mine: Mine, held: Held | None) -> None:
        self.regions = Regions(
            mine.layout,
            prompt_tokens=mine.prompt_tokens,
            pools=opened.pools,
            held_blocks=0 if held is None else held.num_blocks,
        )
        self.manifest: worker_pb2.Manifest | None = None
        self.manifest_s = 0.0  # when it came, on the monotonic clock
        self.refusal: HandoffRefused | None = None  # nothing more counts
        self.changed = asyncio.Event()
        self._opened, self._mine, self._held = opened, mine, held

    async def collect(self, parts: Parts) -> None:
        """Take the owner's stream to its end. Raises nothing: a broken stream is a refusal."""
        try:
            async for part in parts:
                self.take(part)
                if self.refusal is not None or self.manifest is not None:
                    return
            self._refuse(refused("withdrawn", "the owner ended its parts without a manifest"))
        except grpc.aio.AioRpcError as error:
            words = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
            named = words.get("moonrelay-reason")
            reason = "held" if named == "held" else "withdrawn" if named == "withdrawn" else "transfer"
            self._refuse(refused(reason, f"following failed: {error.code().name} {error.details()}"))  # type: ignore[arg-type]

    def take(self, part: worker_pb2.HandoffPart) -> None:
        """Judge one part."""
        match part.WhichOneof("part"):
            case "rows":
                spans = [region(span) for span in part.rows.blocks]
                self._refuse(self.regions.rows(part.rows.first_block, spans))
            case "state":
                self._refuse(self.regions.state(state_from_wire(part.state)))
            case "manifest":
                self._close(part.manifest)
            case "withdrawn":
                self._refuse(refused("withdrawn", part.withdrawn.reason))
        self.changed.set()

    def _close(self, wire: worker_pb2.Manifest) -> None:
        manifest = manifest_from_wire(wire)
        self._refuse(check_manifest(manifest, self._opened, self._mine, self._held) or self.regions.close(manifest))
        if self.refusal is None:
            self.manifest, self.manifest_s = wire, time.monotonic()

    def _refuse(self, refusal: HandoffRefused | None) -> None:
        if refusal is not None:
            self.refusal = self.refusal or refusal
            self.changed.set()
