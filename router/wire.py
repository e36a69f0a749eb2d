"""The router's own types as protobuf messages, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from moonrelay.prefix import Fingerprint
from moonrelay.stubs.v1 import common_pb2
from router.core import CacheAccount
from router.output import SampledToken


def fingerprint_proto(fingerprint: Fingerprint) -> common_pb2.Fingerprint:
    return common_pb2.Fingerprint(**{name: getattr(fingerprint, name) for name in fingerprint.__struct_fields__})


def sampled(tokens: Iterable[common_pb2.Token]) -> list[SampledToken]:
    return [
        SampledToken(
            id=token.id,
            logprob=token.logprob if token.HasField("logprob") else None,
            top=tuple((entry.id, entry.logprob) for entry in token.top),
        )
        for token in tokens
    ]


def token_proto(token: SampledToken) -> common_pb2.Token:
    top = [common_pb2.TopLogprob(id=token_id, logprob=logprob) for token_id, logprob in token.top]
    return common_pb2.Token(id=token.id, logprob=token.logprob, top=top)


def restored_by_tier(cache: common_pb2.CacheUsage) -> dict[str, int]:
    return {
        "device": cache.cached_device,
        "host": cache.cached_host,
        "disk": cache.cached_disk,
        "remote": cache.cached_remote,
    }


def cache_proto(account: CacheAccount) -> common_pb2.CacheUsage:
    tiers = dict(account.by_tier)
    return common_pb2.CacheUsage(
        cached_tokens=account.cached_tokens,
        cached_device=tiers["device"],
        cached_host=tiers["host"],
        cached_disk=tiers["disk"],
        cached_remote=tiers["remote"],
        matchable_tokens=account.matchable_tokens,
        miss_reason=_reason_proto(account.miss_reason),
        lost=[common_pb2.LostTokens(reason=_reason_proto(why), tokens=tokens) for why, tokens in account.lost],
        seen_tokens=account.possible_tokens,
        drafter_cold=account.drafter_cold,
    )


def miss_reason_name(reason: int) -> str | None:
    """The closed word for a wire value; None where nothing was lost."""
    if reason == common_pb2.MISS_REASON_UNSPECIFIED:
        return None
    return common_pb2.MissReason.Name(reason).removeprefix("MISS_REASON_").lower()  # type: ignore[no-any-return]


def _reason_proto(reason: str | None) -> common_pb2.MissReason:
    name = "UNSPECIFIED" if reason is None else reason.upper()
    return cast(common_pb2.MissReason, common_pb2.MissReason.Value(f"MISS_REASON_{name}"))
