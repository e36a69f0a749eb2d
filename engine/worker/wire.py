"""Protobuf on one side, the workers' own values on the other. What is malformed raises InvalidRequest here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.api import SampledToken, SamplingParams
from engine.worker.turn import TurnPrompt
from model.batch import PoolLayout
from moonrelay.errors import ContextLengthExceeded, InvalidRequest
from moonrelay.ids import PrefixHash
from moonrelay.prefix import HASH_BYTES, Fingerprint
from moonrelay.stubs.v1 import common_pb2, worker_pb2

FINISH: dict[str, common_pb2.FinishReason] = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A checked PrefillRequest. `hit` stays in its wire form: only the cache client reads it.

    `turn`: what the turn is written back to; None where it is not. `tenant` is for metrics.
    """

    request_id: str
    ids: Sequence[int]
    sampling: SamplingParams
    root: bytes
    hashes: tuple[PrefixHash, ...]
    hit: worker_pb2.CacheHit | None
    snapshot_at: tuple[int, ...]
    store: bool
    turn: TurnPrompt | None = None
    tenant: str = ""


def prompt_from_wire(request: worker_pb2.PrefillRequest, *, block_tokens: int, max_context: int) -> Prompt:
    """Raises: InvalidRequest, ContextLengthExceeded."""
    ids = tuple(request.prompt_ids)
    sampling = sampling_from_wire(request.sampling)
    check_length(len(ids), sampling.max_tokens, max_context)
    hashes = tuple(PrefixHash(h) for h in request.prefix_hashes)
    if len(hashes) != len(ids) // block_tokens or any(len(h) != HASH_BYTES for h in (request.root, *hashes)):
        raise InvalidRequest(
            f"expected a root and {len(ids) // block_tokens} hashes of {HASH_BYTES} bytes, found {len(hashes)}",
            param="prefix_hashes",
        )
    hit = request.hit if request.HasField("hit") else None
    if hit is not None and (hit.tokens % block_tokens or not 0 < hit.tokens < len(ids)):
        raise InvalidRequest(f"a hit of {hit.tokens} tokens in a prompt of {len(ids)}", param="hit")
    cuts = tuple(request.snapshot_at)
    if list(cuts) != sorted(set(cuts)) or any(cut % block_tokens or not 0 < cut <= len(ids) for cut in cuts):
        raise InvalidRequest(f"snapshots at {cuts} in a prompt of {len(ids)}", param="snapshot_at")
    return Prompt(
        request_id=request.request_id,
        ids=ids,
        sampling=sampling,
        root=request.root,
        hashes=hashes,
        hit=hit,
        snapshot_at=cuts,
        store=request.store,
        turn=TurnPrompt(root=request.root, hashes=hashes, tail=ids[len(hashes) * block_tokens :], hit=hit)
        if request.write_back
        else None,
        tenant=request.tenant,
    )


def check_length(prompt_tokens: int, max_tokens: int, max_context: int) -> None:
    """Raises: InvalidRequest for an empty prompt, ContextLengthExceeded."""
    if prompt_tokens < 1:
        raise InvalidRequest("the prompt has no tokens", param="prompt_ids")
    if prompt_tokens + max_tokens > max_context:
        raise ContextLengthExceeded(
            f"{prompt_tokens} prompt tokens and up to {max_tokens} new ones exceed a context of {max_context}",
            param="max_tokens",
        )


def sampling_from_wire(sampling: common_pb2.Sampling) -> SamplingParams:
    """Raises: InvalidRequest where the message was left out; values are judged by the engine."""
    if sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        choice=sampling.choice,
        max_tokens=sampling.max_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        top_logprobs=sampling.top_logprobs if sampling.HasField("top_logprobs") else None,
        reproducible=sampling.reproducible,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        generated=tuple(sampling.generated),
    )


def after_first_token(sampling: SamplingParams, token: int) -> SamplingParams:
    """What is left of a request whose first token the prefill side has drawn."""
    generated = (*sampling.generated, token) if sampling.penalises else ()
    return replace(sampling, max_tokens=sampling.max_tokens - 1, generated=generated)


def token_to_wire(token: SampledToken) -> common_pb2.Token:
    wire = common_pb2.Token(id=token.id)
    if token.logprob is not None:
        wire.logprob = token.logprob
        wire.top.extend(common_pb2.TopLogprob(id=i, logprob=p) for i, p in token.top)
    return wire


def fingerprint_to_wire(fingerprint: Fingerprint) -> common_pb2.Fingerprint:
    return common_pb2.Fingerprint(**{name: getattr(fingerprint, name) for name in Fingerprint.__struct_fields__})


def fingerprint_from_wire(wire: common_pb2.Fingerprint) -> Fingerprint:
    return Fingerprint(**{name: getattr(wire, name) for name in Fingerprint.__struct_fields__})


def layout_to_wire(layout: PoolLayout) -> common_pb2.Layout:
    return common_pb2.Layout(**{name: getattr(layout, name) for name in PoolLayout.__dataclass_fields__})


def layout_from_wire(wire: common_pb2.Layout) -> PoolLayout:
    return PoolLayout(**{name: getattr(wire, name) for name in PoolLayout.__dataclass_fields__})
