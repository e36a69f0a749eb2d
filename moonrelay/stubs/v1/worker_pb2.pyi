from moonrelay.stubs.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "sampling", "root", "prefix_hashes", "hit", "snapshot_at", "store", "write_back", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    HIT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_AT_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    WRITE_BACK_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.Sampling
    root: bytes
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    hit: CacheHit
    snapshot_at: _containers.RepeatedScalarFieldContainer[int]
    store: bool
    write_back: bool
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., root: _Optional[bytes] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ..., hit: _Optional[_Union[CacheHit, _Mapping]] = ..., snapshot_at: _Optional[_Iterable[int]] = ..., store: _Optional[bool] = ..., write_back: _Optional[bool] = ..., tenant: _Optional[str] = ...) -> None: ...

class TurnWriteback(_message.Message):
    __slots__ = ("root", "prefix_hashes", "tail_ids", "hit")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    TAIL_IDS_FIELD_NUMBER: _ClassVar[int]
    HIT_FIELD_NUMBER: _ClassVar[int]
    root: bytes
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    tail_ids: _containers.RepeatedScalarFieldContainer[int]
    hit: CacheHit
    def __init__(self, root: _Optional[bytes] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ..., tail_ids: _Optional[_Iterable[int]] = ..., hit: _Optional[_Union[CacheHit, _Mapping]] = ...) -> None: ...

class CacheHit(_message.Message):
    __slots__ = ("tokens", "runs", "snapshot", "matchable_tokens", "alternatives", "seen_tokens")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    MATCHABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    SEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    runs: _containers.RepeatedCompositeFieldContainer[CacheRun]
    snapshot: CacheRun
    matchable_tokens: int
    alternatives: _containers.RepeatedCompositeFieldContainer[CacheHit]
    seen_tokens: int
    def __init__(self, tokens: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[CacheRun, _Mapping]]] = ..., snapshot: _Optional[_Union[CacheRun, _Mapping]] = ..., matchable_tokens: _Optional[int] = ..., alternatives: _Optional[_Iterable[_Union[CacheHit, _Mapping]]] = ..., seen_tokens: _Optional[int] = ...) -> None: ...

class CacheRun(_message.Message):
    __slots__ = ("node_id", "node_epoch", "first_block", "end_block")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    END_BLOCK_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    node_epoch: int
    first_block: int
    end_block: int
    def __init__(self, node_id: _Optional[str] = ..., node_epoch: _Optional[int] = ..., first_block: _Optional[int] = ..., end_block: _Optional[int] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("progress", "handoff", "first_token", "opened")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    progress: PrefillProgress
    handoff: HandoffReady
    first_token: FirstToken
    opened: HandoffOpened
    def __init__(self, progress: _Optional[_Union[PrefillProgress, _Mapping]] = ..., handoff: _Optional[_Union[HandoffReady, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., opened: _Optional[_Union[HandoffOpened, _Mapping]] = ...) -> None: ...

class HandoffOpened(_message.Message):
    __slots__ = ("handoff_id", "source", "source_address", "fence", "fingerprint", "layout", "split", "prompt_tokens", "drafter")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    source: _common_pb2.Peer
    source_address: str
    fence: int
    fingerprint: _common_pb2.Fingerprint
    layout: _common_pb2.Layout
    split: Split
    prompt_tokens: int
    drafter: str
    def __init__(self, handoff_id: _Optional[str] = ..., source: _Optional[_Union[_common_pb2.Peer, _Mapping]] = ..., source_address: _Optional[str] = ..., fence: _Optional[int] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., split: _Optional[_Union[Split, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., drafter: _Optional[str] = ...) -> None: ...

class FollowHandoffRequest(_message.Message):
    __slots__ = ("handoff_id", "fence", "held")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    fence: int
    held: HeldPrefix
    def __init__(self, handoff_id: _Optional[str] = ..., fence: _Optional[int] = ..., held: _Optional[_Union[HeldPrefix, _Mapping]] = ...) -> None: ...

class HeldPrefix(_message.Message):
    __slots__ = ("root", "prefix_hash", "num_blocks")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    root: bytes
    prefix_hash: bytes
    num_blocks: int
    def __init__(self, root: _Optional[bytes] = ..., prefix_hash: _Optional[bytes] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class HandoffPart(_message.Message):
    __slots__ = ("rows", "state", "manifest", "withdrawn")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    rows: RowsPart
    state: StatePart
    manifest: Manifest
    withdrawn: HandoffWithdrawn
    def __init__(self, rows: _Optional[_Union[RowsPart, _Mapping]] = ..., state: _Optional[_Union[StatePart, _Mapping]] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., withdrawn: _Optional[_Union[HandoffWithdrawn, _Mapping]] = ...) -> None: ...

class RowsPart(_message.Message):
    __slots__ = ("first_block", "blocks")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    def __init__(self, first_block: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ...) -> None: ...

class StatePart(_message.Message):
    __slots__ = ("first_layer", "end_layer", "recurrent", "conv")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    RECURRENT_FIELD_NUMBER: _ClassVar[int]
    CONV_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    end_layer: int
    recurrent: _common_pb2.Span
    conv: _common_pb2.Span
    def __init__(self, first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., recurrent: _Optional[_Union[_common_pb2.Span, _Mapping]] = ..., conv: _Optional[_Union[_common_pb2.Span, _Mapping]] = ...) -> None: ...

class HandoffWithdrawn(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Split(_message.Message):
    __slots__ = ("tp_size", "tp_rank", "first_head", "end_head")
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    END_HEAD_FIELD_NUMBER: _ClassVar[int]
    tp_size: int
    tp_rank: int
    first_head: int
    end_head: int
    def __init__(self, tp_size: _Optional[int] = ..., tp_rank: _Optional[int] = ..., first_head: _Optional[int] = ..., end_head: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token", "cache")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    token: _common_pb2.Token
    cache: _common_pb2.CacheUsage
    def __init__(self, token: _Optional[_Union[_common_pb2.Token, _Mapping]] = ..., cache: _Optional[_Union[_common_pb2.CacheUsage, _Mapping]] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("tokens_done",)
    TOKENS_DONE_FIELD_NUMBER: _ClassVar[int]
    tokens_done: int
    def __init__(self, tokens_done: _Optional[int] = ...) -> None: ...

class HandoffReady(_message.Message):
    __slots__ = ("finish_reason",)
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _common_pb2.FinishReason
    def __init__(self, finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("handoff_id", "fingerprint", "layout", "tokens_in_state", "next_token", "sampler_position", "rows", "source", "source_address", "fence", "lease_ms", "state", "split", "held", "drafter", "draft_first")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_STATE_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_POSITION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIRST_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    fingerprint: _common_pb2.Fingerprint
    layout: _common_pb2.Layout
    tokens_in_state: int
    next_token: int
    sampler_position: int
    rows: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    source: _common_pb2.Peer
    source_address: str
    fence: int
    lease_ms: int
    state: _containers.RepeatedCompositeFieldContainer[StatePart]
    split: Split
    held: HeldPrefix
    drafter: str
    draft_first: int
    def __init__(self, handoff_id: _Optional[str] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., tokens_in_state: _Optional[int] = ..., next_token: _Optional[int] = ..., sampler_position: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ..., source: _Optional[_Union[_common_pb2.Peer, _Mapping]] = ..., source_address: _Optional[str] = ..., fence: _Optional[int] = ..., lease_ms: _Optional[int] = ..., state: _Optional[_Iterable[_Union[StatePart, _Mapping]]] = ..., split: _Optional[_Union[Split, _Mapping]] = ..., held: _Optional[_Union[HeldPrefix, _Mapping]] = ..., drafter: _Optional[str] = ..., draft_first: _Optional[int] = ...) -> None: ...

class ReleaseHandoffRequest(_message.Message):
    __slots__ = ("handoff_id", "fence")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    handoff_id: str
    fence: int
    def __init__(self, handoff_id: _Optional[str] = ..., fence: _Optional[int] = ...) -> None: ...

class ReleaseHandoffReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "prompt_tokens", "max_tokens", "fingerprint", "root", "prefix_hashes", "write_back")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BACK_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_tokens: int
    max_tokens: int
    fingerprint: _common_pb2.Fingerprint
    root: bytes
    prefix_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    write_back: bool
    def __init__(self, request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., root: _Optional[bytes] = ..., prefix_hashes: _Optional[_Iterable[bytes]] = ..., write_back: _Optional[bool] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("reservation_id", "ttl_ms", "held_tokens")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    ttl_ms: int
    held_tokens: int
    def __init__(self, reservation_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., held_tokens: _Optional[int] = ...) -> None: ...

class ReleaseReservationRequest(_message.Message):
    __slots__ = ("reservation_id",)
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    def __init__(self, reservation_id: _Optional[str] = ...) -> None: ...

class ReleaseReservationReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdoptRequest(_message.Message):
    __slots__ = ("request_id", "reservation_id", "sampling", "opened", "writeback", "tenant", "context_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    WRITEBACK_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reservation_id: str
    sampling: _common_pb2.Sampling
    opened: HandoffOpened
    writeback: TurnWriteback
    tenant: str
    context_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., reservation_id: _Optional[str] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., opened: _Optional[_Union[HandoffOpened, _Mapping]] = ..., writeback: _Optional[_Union[TurnWriteback, _Mapping]] = ..., tenant: _Optional[str] = ..., context_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("adopted", "tokens", "finished", "cache")
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    adopted: Adopted
    tokens: Tokens
    finished: Finished
    cache: _common_pb2.CacheUsage
    def __init__(self, adopted: _Optional[_Union[Adopted, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., cache: _Optional[_Union[_common_pb2.CacheUsage, _Mapping]] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("bytes", "transport", "pull_seconds", "verify_seconds", "held_tokens", "after_manifest_seconds")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PULL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AFTER_MANIFEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    transport: str
    pull_seconds: float
    verify_seconds: float
    held_tokens: int
    after_manifest_seconds: float
    def __init__(self, bytes: _Optional[int] = ..., transport: _Optional[str] = ..., pull_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., held_tokens: _Optional[int] = ..., after_manifest_seconds: _Optional[float] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[_common_pb2.Token, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "completion_tokens", "draft")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    completion_tokens: int
    draft: DraftUsage
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., completion_tokens: _Optional[int] = ..., draft: _Optional[_Union[DraftUsage, _Mapping]] = ...) -> None: ...

class DraftUsage(_message.Message):
    __slots__ = ("drafted_tokens", "accepted_tokens", "verify_steps", "plain_steps", "saved_seconds", "draft_seconds", "verify_seconds")
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_STEPS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_STEPS_FIELD_NUMBER: _ClassVar[int]
    SAVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    drafted_tokens: int
    accepted_tokens: int
    verify_steps: int
    plain_steps: int
    saved_seconds: float
    draft_seconds: float
    verify_seconds: float
    def __init__(self, drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., verify_steps: _Optional[int] = ..., plain_steps: _Optional[int] = ..., saved_seconds: _Optional[float] = ..., draft_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ...) -> None: ...
