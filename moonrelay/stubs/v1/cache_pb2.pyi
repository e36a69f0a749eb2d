from moonrelay.stubs.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EntryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENTRY_KIND_UNSPECIFIED: _ClassVar[EntryKind]
    ENTRY_KIND_BLOCK: _ClassVar[EntryKind]
    ENTRY_KIND_SNAPSHOT: _ClassVar[EntryKind]
ENTRY_KIND_UNSPECIFIED: EntryKind
ENTRY_KIND_BLOCK: EntryKind
ENTRY_KIND_SNAPSHOT: EntryKind

class PublishRequest(_message.Message):
    __slots__ = ("root", "source", "entries")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    root: bytes
    source: _common_pb2.Peer
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, root: _Optional[bytes] = ..., source: _Optional[_Union[_common_pb2.Peer, _Mapping]] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("kind", "prefix_hash", "depth", "spans", "parent", "drafter", "draft_spans")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SPANS_FIELD_NUMBER: _ClassVar[int]
    kind: EntryKind
    prefix_hash: bytes
    depth: int
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    parent: bytes
    drafter: str
    draft_spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    def __init__(self, kind: _Optional[_Union[EntryKind, str]] = ..., prefix_hash: _Optional[bytes] = ..., depth: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ..., parent: _Optional[bytes] = ..., drafter: _Optional[str] = ..., draft_spans: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("stored", "already_there", "refused", "in_progress", "drafts")
    STORED_FIELD_NUMBER: _ClassVar[int]
    ALREADY_THERE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    IN_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    stored: int
    already_there: int
    refused: int
    in_progress: int
    drafts: int
    def __init__(self, stored: _Optional[int] = ..., already_there: _Optional[int] = ..., refused: _Optional[int] = ..., in_progress: _Optional[int] = ..., drafts: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("root", "node_epoch", "ttl_ms", "chains", "snapshot", "ended", "drafter")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    root: bytes
    node_epoch: int
    ttl_ms: int
    chains: _containers.RepeatedCompositeFieldContainer[Chain]
    snapshot: bytes
    ended: _containers.RepeatedCompositeFieldContainer[ReleaseRequest]
    drafter: str
    def __init__(self, root: _Optional[bytes] = ..., node_epoch: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., chains: _Optional[_Iterable[_Union[Chain, _Mapping]]] = ..., snapshot: _Optional[bytes] = ..., ended: _Optional[_Iterable[_Union[ReleaseRequest, _Mapping]]] = ..., drafter: _Optional[str] = ...) -> None: ...

class Chain(_message.Message):
    __slots__ = ("last", "first_block", "count")
    LAST_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    last: bytes
    first_block: int
    count: int
    def __init__(self, last: _Optional[bytes] = ..., first_block: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("lease_id", "fence", "ttl_ms", "spans", "draft_spans")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SPANS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    fence: int
    ttl_ms: int
    spans: bytes
    draft_spans: bytes
    def __init__(self, lease_id: _Optional[str] = ..., fence: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., spans: _Optional[bytes] = ..., draft_spans: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_id", "fence")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    fence: int
    def __init__(self, lease_id: _Optional[str] = ..., fence: _Optional[int] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("ttl_ms",)
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ttl_ms: int
    def __init__(self, ttl_ms: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "fence")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    fence: int
    def __init__(self, lease_id: _Optional[str] = ..., fence: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
