from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_COLD: _ClassVar[MissReason]
    MISS_REASON_NO_SNAPSHOT: _ClassVar[MissReason]
    MISS_REASON_SNAPSHOT_EVICTED: _ClassVar[MissReason]
    MISS_REASON_BLOCK_EVICTED: _ClassVar[MissReason]
    MISS_REASON_DIVERGED: _ClassVar[MissReason]
    MISS_REASON_SALT: _ClassVar[MissReason]
    MISS_REASON_FINGERPRINT: _ClassVar[MissReason]
    MISS_REASON_RETOKENISED: _ClassVar[MissReason]
    MISS_REASON_STALE_INDEX: _ClassVar[MissReason]
    MISS_REASON_TIER_ERROR: _ClassVar[MissReason]
    MISS_REASON_REMAINDER: _ClassVar[MissReason]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
    TIER_REMOTE: _ClassVar[Tier]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_COLD: MissReason
MISS_REASON_NO_SNAPSHOT: MissReason
MISS_REASON_SNAPSHOT_EVICTED: MissReason
MISS_REASON_BLOCK_EVICTED: MissReason
MISS_REASON_DIVERGED: MissReason
MISS_REASON_SALT: MissReason
MISS_REASON_FINGERPRINT: MissReason
MISS_REASON_RETOKENISED: MissReason
MISS_REASON_STALE_INDEX: MissReason
MISS_REASON_TIER_ERROR: MissReason
MISS_REASON_REMAINDER: MissReason
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_DISK: Tier
TIER_REMOTE: Tier

class Peer(_message.Message):
    __slots__ = ("instance_id", "epoch", "nixl_name", "nixl_metadata", "tcp_address", "host_id", "pools", "pid", "probe", "rdma")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NIXL_NAME_FIELD_NUMBER: _ClassVar[int]
    NIXL_METADATA_FIELD_NUMBER: _ClassVar[int]
    TCP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    RDMA_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    nixl_name: str
    nixl_metadata: bytes
    tcp_address: str
    host_id: str
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    pid: int
    probe: Span
    rdma: bool
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., nixl_name: _Optional[str] = ..., nixl_metadata: _Optional[bytes] = ..., tcp_address: _Optional[str] = ..., host_id: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., pid: _Optional[int] = ..., probe: _Optional[_Union[Span, _Mapping]] = ..., rdma: _Optional[bool] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("id", "base", "length")
    ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    id: int
    base: int
    length: int
    def __init__(self, id: _Optional[int] = ..., base: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("pool", "offset", "length", "xxh3")
    POOL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    XXH3_FIELD_NUMBER: _ClassVar[int]
    pool: int
    offset: int
    length: int
    xxh3: int
    def __init__(self, pool: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., xxh3: _Optional[int] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("model", "weights_revision", "tokenizer_revision", "row_dtype", "snapshot_dtype", "layout_version", "numerics_version", "block_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_REVISION_FIELD_NUMBER: _ClassVar[int]
    ROW_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights_revision: str
    tokenizer_revision: str
    row_dtype: str
    snapshot_dtype: str
    layout_version: str
    numerics_version: str
    block_tokens: int
    def __init__(self, model: _Optional[str] = ..., weights_revision: _Optional[str] = ..., tokenizer_revision: _Optional[str] = ..., row_dtype: _Optional[str] = ..., snapshot_dtype: _Optional[str] = ..., layout_version: _Optional[str] = ..., numerics_version: _Optional[str] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("block_tokens", "num_mla_layers", "row_width", "num_kda_layers", "num_heads", "key_dim", "value_dim", "conv_history", "draft_width")
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_MLA_LAYERS_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    NUM_KDA_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    KEY_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    CONV_HISTORY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WIDTH_FIELD_NUMBER: _ClassVar[int]
    block_tokens: int
    num_mla_layers: int
    row_width: int
    num_kda_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    conv_history: int
    draft_width: int
    def __init__(self, block_tokens: _Optional[int] = ..., num_mla_layers: _Optional[int] = ..., row_width: _Optional[int] = ..., num_kda_layers: _Optional[int] = ..., num_heads: _Optional[int] = ..., key_dim: _Optional[int] = ..., value_dim: _Optional[int] = ..., conv_history: _Optional[int] = ..., draft_width: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "choice", "max_tokens", "stop_token_ids", "top_logprobs", "reproducible", "presence_penalty", "frequency_penalty", "logit_bias", "generated")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPRODUCIBLE_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    choice: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: int
    reproducible: bool
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    generated: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[int] = ..., reproducible: _Optional[bool] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., generated: _Optional[_Iterable[int]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "logprob", "top")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class CacheUsage(_message.Message):
    __slots__ = ("cached_tokens", "cached_device", "cached_host", "cached_disk", "cached_remote", "matchable_tokens", "miss_reason", "lost", "seen_tokens", "drafter_cold")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_DEVICE_FIELD_NUMBER: _ClassVar[int]
    CACHED_HOST_FIELD_NUMBER: _ClassVar[int]
    CACHED_DISK_FIELD_NUMBER: _ClassVar[int]
    CACHED_REMOTE_FIELD_NUMBER: _ClassVar[int]
    MATCHABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    SEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_COLD_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    cached_device: int
    cached_host: int
    cached_disk: int
    cached_remote: int
    matchable_tokens: int
    miss_reason: MissReason
    lost: _containers.RepeatedCompositeFieldContainer[LostTokens]
    seen_tokens: int
    drafter_cold: int
    def __init__(self, cached_tokens: _Optional[int] = ..., cached_device: _Optional[int] = ..., cached_host: _Optional[int] = ..., cached_disk: _Optional[int] = ..., cached_remote: _Optional[int] = ..., matchable_tokens: _Optional[int] = ..., miss_reason: _Optional[_Union[MissReason, str]] = ..., lost: _Optional[_Iterable[_Union[LostTokens, _Mapping]]] = ..., seen_tokens: _Optional[int] = ..., drafter_cold: _Optional[int] = ...) -> None: ...

class LostTokens(_message.Message):
    __slots__ = ("reason", "tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: MissReason
    tokens: int
    def __init__(self, reason: _Optional[_Union[MissReason, str]] = ..., tokens: _Optional[int] = ...) -> None: ...
