"""A handoff's messages as the reader's own values."""

from __future__ import annotations

from decode.manifest import Held, Manifest, Opened, Region, Split, StateRegions
from engine.worker.wire import fingerprint_from_wire, layout_from_wire
from moonrelay.stubs.v1 import common_pb2, worker_pb2


def opened_from_wire(wire: worker_pb2.HandoffOpened) -> Opened:
    return _opened(wire, wire.prompt_tokens)


def manifest_from_wire(wire: worker_pb2.Manifest) -> Manifest:
    return Manifest(
        opened=_opened(wire, wire.tokens_in_state),
        next_token=wire.next_token,
        sampler_position=wire.sampler_position,
        rows=[region(span) for span in wire.rows],
        state=[state_from_wire(part) for part in wire.state],
        held=held_from_wire(wire.held) if wire.HasField("held") else None,
        lease_ms=wire.lease_ms,
        draft_first=wire.draft_first,
    )


def _opened(wire: worker_pb2.HandoffOpened | worker_pb2.Manifest, prompt_tokens: int) -> Opened:
    """Of a manifest: what its handoff must have been opened as."""
    return Opened(
        handoff_id=wire.handoff_id,
        fingerprint=fingerprint_from_wire(wire.fingerprint),
        layout=layout_from_wire(wire.layout),
        split=_split(wire.split),
        prompt_tokens=prompt_tokens,
        instance_id=wire.source.instance_id,
        epoch=wire.source.epoch,
        pools={pool.id: pool.length for pool in wire.source.pools},
        fence=wire.fence,
        drafter=wire.drafter,
    )


def state_from_wire(wire: worker_pb2.StatePart) -> StateRegions:
    return StateRegions(
        first_layer=wire.first_layer,
        end_layer=wire.end_layer,
        recurrent=region(wire.recurrent),
        conv=region(wire.conv),
    )


def held_from_wire(wire: worker_pb2.HeldPrefix) -> Held:
    return Held(root=wire.root, prefix_hash=wire.prefix_hash, num_blocks=wire.num_blocks)


def held_to_wire(held: Held | None) -> worker_pb2.HeldPrefix | None:
    if held is None:
        return None
    return worker_pb2.HeldPrefix(root=held.root, prefix_hash=held.prefix_hash, num_blocks=held.num_blocks)


def region(span: common_pb2.Span) -> Region:
    return Region(pool=span.pool, offset=span.offset, length=span.length, xxh3=span.xxh3)


def _split(wire: worker_pb2.Split) -> Split:
    return Split(
        tp_size=wire.tp_size, tp_rank=wire.tp_rank, first_head=wire.first_head, end_head=wire.end_head
    )  # fmt: skip
