"""Generated ids by the text that clients send back: in Redis, so that every router of a cluster knows them.

Keys, a conversation's all under one hash tag (one script, one slot; conversations spread):
    mr:{TAG}:turn:KEY     msgpack of `KeptTurn`; TAG names the conversation's beginning
    mr:{TAG}:text:HEAD    list, newest first, of msgpack `KeptText`; TAG names the first characters
Digests cover the tenant's salt and the tokenizer's revision. Nothing here is believed: ids are taken only where they
are exactly the text they stand for. A store that cannot be asked or does not know costs cached tokens and no more.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec
from redis.asyncio import Redis

from model.spelling import Piece, Spelling
from model.splice import Reply
from moonrelay.valkey import FAILURES, raise_if_cancelled

log = logging.getLogger(__name__)
T = TypeVar("T")
KEYS_PER_CALL: Final = 1_000  # Lua unpacks a few thousand at most
TEXTS_PER_HEAD: Final = 16
assert array("I").itemsize == 4

# KEYS: what is wanted. ARGV: seconds to live, anew from now on for what is found.
GET_TURNS: Final = """
local found = redis.call('MGET', unpack(KEYS))
for i, value in ipairs(found) do
  if value then redis.call('EXPIRE', KEYS[i], ARGV[1]) end
end
return found
"""
GET_TEXTS: Final = """
local found = {}
for _, key in ipairs(KEYS) do
  local values = redis.call('LRANGE', key, 0, -1)
  if #values > 0 then redis.call('EXPIRE', key, ARGV[1]) end
  for _, value in ipairs(values) do found[#found + 1] = value end
end
return found
"""
# ARGV: seconds to live, the value, the longest list.
KEEP_TEXT: Final = """
redis.call('LREM', KEYS[1], 0, ARGV[2])
redis.call('LPUSH', KEYS[1], ARGV[2])
redis.call('LTRIM', KEYS[1], 0, ARGV[3] - 1)
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""


class KeptTurn(msgspec.Struct, frozen=True, array_like=True, tag="turn-1"):
    """`ids`: little-endian uint32."""

    ids: bytes
    whole: bool


class KeptText(msgspec.Struct, frozen=True, array_like=True, tag="text-1"):
    """`pieces`: (characters, ids as little-endian uint32, or None for what tokenising gives)."""

    chars: int
    digest: bytes
    pieces: tuple[tuple[int, bytes | None], ...]


class IdStore(Protocol):
    """What was generated, by text. Asking never fails and never takes long: what is not known is None."""

    async def turns(self, tag: bytes, keys: Sequence[bytes]) -> list[Reply | None]: ...

    async def texts(self, tag: bytes, heads: Sequence[bytes]) -> list[Spelling]: ...

    async def keep_turn(self, tag: bytes, key: bytes, reply: Reply) -> None: ...

    async def keep_text(self, tag: bytes, head: bytes, spelling: Spelling) -> None: ...


class RedisIdStore:
    """Loop thread only. `usable` says whether Redis is known to be away, so that nobody waits to find out."""

    def __init__(
        self, redis: Redis, *, ttl_s: int, bytes_max: int, timeout_s: float, usable: Callable[[], bool]
    ) -> None:
        self._ttl_s = ttl_s
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s
        self._usable = usable
        self._away = False
        self._redis = redis
        self._get_turns = redis.register_script(GET_TURNS)
        self._get_texts = redis.register_script(GET_TEXTS)
        self._keep_text = redis.register_script(KEEP_TEXT)

    async def turns(self, tag: bytes, keys: Sequence[bytes]) -> list[Reply | None]:
        found: list[Reply | None] = []
        for at in range(0, len(keys), KEYS_PER_CALL):
            some = [_key(tag, "turn", key) for key in keys[at : at + KEYS_PER_CALL]]
            values = await self._ask(self._get_turns(keys=some, args=[self._ttl_s]), [None] * len(some))
            kept = [None if value is None else _decoded(value, KeptTurn) for value in values]
            found += [None if one is None else Reply(_ids(one.ids), one.whole) for one in kept]
        return found

    async def texts(self, tag: bytes, heads: Sequence[bytes]) -> list[Spelling]:
        keys = [_key(tag, "text", head) for head in heads]
        values = await self._ask(self._get_texts(keys=keys, args=[self._ttl_s]), [])
        kept = [one for value in values if (one := _decoded(value, KeptText)) is not None]
        return [Spelling(one.chars, one.digest, tuple(_piece(*piece) for piece in one.pieces)) for one in kept]

    async def keep_turn(self, tag: bytes, key: bytes, reply: Reply) -> None:
        value = msgspec.msgpack.encode(KeptTurn(_bytes(reply.ids), reply.whole))
        if len(value) <= self._bytes_max:
            await self._ask(self._redis.set(_key(tag, "turn", key), value, ex=self._ttl_s), None)

    async def keep_text(self, tag: bytes, head: bytes, spelling: Spelling) -> None:
        pieces = tuple((piece.chars, None if piece.ids is None else _bytes(piece.ids)) for piece in spelling.pieces)
        value = msgspec.msgpack.encode(KeptText(spelling.chars, spelling.digest, pieces))
        if len(value) <= self._bytes_max:
            args: list[int | bytes] = [self._ttl_s, value, TEXTS_PER_HEAD]
            await self._ask(self._keep_text(keys=[_key(tag, "text", head)], args=args), None)

    async def _ask(self, call: Awaitable[T], otherwise: T) -> T:
        if not self._usable():
            _drop(call)
            return otherwise
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await call
        except FAILURES as error:
            if not self._away:
                log.warning("generated ids out of reach", extra={"reason": type(error).__name__})
            self._away = True
            return otherwise
        raise_if_cancelled()
        self._away = False
        return answer


def _drop(call: Any) -> None:
    """End a call that was never begun, so that nobody is told it was forgotten."""
    if hasattr(call, "close"):
        call.close()


def _key(tag: bytes, family: str, name: bytes) -> str:
    return f"mr:{{{tag.hex()}}}:{family}:{name.hex()}"


def _decoded(value: bytes, kind: type[T]) -> T | None:
    """None for what another version wrote, or somebody else."""
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except msgspec.DecodeError:
        return None


def _piece(chars: int, ids: bytes | None) -> Piece:
    return Piece(chars, None if ids is None else _ids(ids))


def _bytes(ids: Sequence[int]) -> bytes:
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _ids(packed: bytes) -> list[int]:
    ids = array("I")
    ids.frombytes(packed[: len(packed) // 4 * 4])
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
