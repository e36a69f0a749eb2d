"""What a turn generated, kept for the request that sends it back, and found again then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, TypeVar

from model import spelling, splice
from model.renderer import RenderError, render_reply
from model.spelling import Spelling
from model.splice import Reply
from model.tokenizer import Tokenizer
from router.idstore import IdStore
from router.prompt import Draft, Recalled
from router.turn import Turn

T = TypeVar("T")
OFF_LOOP_TOKENS: Final = 1_000  # tokenising this much takes a millisecond
OFF_LOOP_CHARS: Final = 10_000


class Recall:
    def __init__(self, store: IdStore, tokenizer: Tokenizer, revision: str, threads: Executor) -> None:
        self._store = store
        self._tokenizer = tokenizer
        self._revision = revision
        self._threads = threads

    def salt(self, tenant: str) -> bytes:
        """Two tenants share no key, nor do two vocabularies or ways to render."""
        return f"{self._revision}\0{tenant}".encode()

    async def find(self, draft: Draft) -> Recalled | None:
        """One round trip; none where nothing can have been generated before."""
        if draft.keys is not None and draft.keys.keys:
            return Recalled(turns=await self._store.turns(draft.tag, draft.keys.keys))
        if draft.heads:
            return Recalled(texts=await self._store.texts(draft.tag, draft.heads))
        return None

    async def keep(self, turn: Turn) -> None:
        """Write what the turn generated, where tokenising the text that comes back might not give it."""
        draft = turn.draft
        if draft.keys is not None:
            named = await self._compute(turn, lambda: self._reply(turn, draft))
            if named is not None:
                await self._store.keep_turn(draft.tag, *named)
        elif isinstance(draft.request.prompt, str):
            kept = await self._compute(turn, lambda: self._spelling(turn, draft))
            if kept is not None:
                await self._store.keep_text(*kept)

    def _reply(self, turn: Turn, draft: Draft) -> tuple[bytes, Reply] | None:
        """The turn's key and ids. A call that no request could hold is not kept."""
        assert draft.keys is not None
        message = turn.message()
        if message is None:
            return None
        try:
            segments = render_reply(message, thinking=turn.prompt.thinking)
        except RenderError:
            return None
        reply = splice.reply_to_keep(turn.generated, segments, self._tokenizer)
        return None if reply is None else (splice.reply_key(draft.keys.before, segments), reply)

    def _spelling(self, turn: Turn, draft: Draft) -> tuple[bytes, bytes, Spelling] | None:
        prompt, text = turn.prompt, draft.request.prompt
        assert isinstance(text, str)
        return spelling.spelling_to_keep(text, prompt.ids, prompt.pieces, turn.generated, self._tokenizer, draft.salt)

    async def _compute(self, turn: Turn, work: Callable[[], T]) -> T:
        prompt = turn.draft.request.prompt
        chars = len(prompt) if isinstance(prompt, str) else 0
        if len(turn.generated) > OFF_LOOP_TOKENS or chars > OFF_LOOP_CHARS:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        return work()
