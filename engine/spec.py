"""What a client can ask wrongly of the engine, refused before anything is queued. Torch-free."""

from __future__ import annotations

from engine.api import SamplingParams, SequenceSpec
from engine.settings import TILE_TOKENS
from moonrelay.errors import ContextLengthExceeded, InvalidRequest

TOP_LOGPROBS_MAX = 64  # more would make one event larger than its message is worth
PENALTY_MAX, BIAS_MAX = 2.0, 100.0  # either way; as OpenAI's API has them


def validate(spec: SequenceSpec, *, vocab_size: int, context_len: int) -> None:
    """Raises: InvalidRequest naming the field; ContextLengthExceeded."""
    if spec.restored < 0:
        raise InvalidRequest("restored must not be negative", param="restored")
    if not 0 <= spec.draft_first <= spec.restored:
        raise InvalidRequest("draft_first must lie in the restored tokens", param="draft_first")
    if not spec.ids:
        raise InvalidRequest("there must be at least one token to compute", param="prompt")
    if min(spec.ids) < 0 or max(spec.ids) >= vocab_size:
        raise InvalidRequest(f"token ids must be in [0, {vocab_size})", param="prompt")
    prompt_end = spec.restored + len(spec.ids)
    if prompt_end > context_len:
        raise ContextLengthExceeded(f"{prompt_end} tokens exceed the context of {context_len}", param="prompt")
    previous = spec.restored
    for boundary in spec.snapshot_at:
        if boundary <= previous or boundary % TILE_TOKENS:
            raise InvalidRequest(f"snapshots must ascend in multiples of {TILE_TOKENS}", param="snapshot_at")
        previous = boundary
    validate_sampling(spec.sampling, vocab_size=vocab_size)


def validate_sampling(params: SamplingParams, *, vocab_size: int) -> None:
    """Raises: InvalidRequest naming the field. NaN fails every comparison, so it is refused too."""
    rules = {
        "temperature": 0.0 <= params.temperature < float("inf"),
        "top_p": 0.0 < params.top_p <= 1.0,
        "top_k": params.top_k >= 0,
        "seed": 0 <= params.seed < 2**64,
        "choice": 0 <= params.choice < 2**32,
        "max_tokens": params.max_tokens >= 1,
        "presence_penalty": -PENALTY_MAX <= params.presence_penalty <= PENALTY_MAX,
        "frequency_penalty": -PENALTY_MAX <= params.frequency_penalty <= PENALTY_MAX,
        "logit_bias": all(0 <= i < vocab_size and -BIAS_MAX <= bias <= BIAS_MAX for i, bias in params.logit_bias),
        "generated": all(0 <= i < vocab_size for i in params.generated),
        "top_logprobs": params.top_logprobs is None or 0 <= params.top_logprobs <= min(TOP_LOGPROBS_MAX, vocab_size),
    }
    for name, holds in rules.items():
        if not holds:
            raise InvalidRequest(f"{name} is out of range: {getattr(params, name)}", param=name)
