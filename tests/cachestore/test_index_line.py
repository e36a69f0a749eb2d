"""The lookup's connection: every caller gets its own answer or an error of Redis's, by a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import InvalidResponse, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from cachestore import index_line
from cachestore.index_line import ScriptLine
from moonrelay.valkey import FAILURES, LocalValkey, connect, start_local_valkey

ECHO = "return {KEYS[1], ARGV[1]}"


async def with_line(redis: Redis, test: Callable[[ScriptLine], Awaitable[None]]) -> None:
    line = ScriptLine(redis, ECHO)
    try:
        await test(line)
    finally:
        line.close()
        await redis.aclose()


def test_callers_at_once_get_their_own_answers_whoever_stops_waiting(valkey: LocalValkey) -> None:
    async def run(line: ScriptLine) -> None:
        assert await line.call("{k}", 0) == [b"{k}", b"0"]
        calls = [asyncio.ensure_future(line.call(f"{{k}}{i}", i)) for i in range(40)]
        await asyncio.sleep(0)
        for i in range(0, 40, 3):
            calls[i].cancel()
        found = await asyncio.gather(*calls, return_exceptions=True)
        for i, answer in enumerate(found):
            if i % 3:
                assert answer == [b"{k}%d" % i, b"%d" % i]
            else:
                assert isinstance(answer, asyncio.CancelledError)

    asyncio.run(with_line(connect(valkey.url), run))


def test_a_script_that_redis_forgot_is_given_to_it_again(valkey: LocalValkey) -> None:
    async def run(line: ScriptLine) -> None:
        redis = connect(valkey.url)
        for _ in range(2):
            await redis.script_flush()
            assert await line.call("{k}", 1) == [b"{k}", b"1"]
            assert await redis.script_exists(line._sha) == [True]
        await redis.aclose()

    asyncio.run(with_line(connect(valkey.url), run))


def test_a_script_that_fails_is_an_error_and_the_next_call_goes_on(valkey: LocalValkey) -> None:
    async def run() -> None:
        redis = connect(valkey.url)
        line = ScriptLine(redis, "return redis.call('HGET', KEYS[1], ARGV[1])")
        await redis.set("{k}text", "no hash")
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await line.call("{k}text", "field")
        assert await line.call("{k}nothing", "field") is None
        line.close()
        await redis.aclose()

    asyncio.run(run())


def test_password_and_database_are_those_of_the_client(valkey: LocalValkey) -> None:
    async def run() -> None:
        admin = connect(valkey.url)
        await admin.execute_command("ACL", "SETUSER", "reader", "on", ">word", "~*", "+@all")
        url = f"unix://reader:word@{valkey.url.removeprefix('unix://')}?db=3"
        redis = connect(url)
        await redis.set("{k}here", "yes")
        line = ScriptLine(redis, "return redis.call('GET', KEYS[1])")
        assert await line.call("{k}here") == b"yes"
        wrong = ScriptLine(connect(url.replace("word", "other")), ECHO)
        for _ in range(2):
            with pytest.raises(ResponseError, match="WRONGPASS"):
                await wrong.call("{k}", 1)
        line.close()
        wrong.close()
        await admin.execute_command("ACL", "DELUSER", "reader")
        await redis.aclose()
        await admin.aclose()

    asyncio.run(run())


def test_a_connection_that_needs_more_goes_through_the_library() -> None:
    assert ScriptLine(connect("rediss://localhost:1/0"), ECHO)._script is not None
    assert ScriptLine(connect("redis://localhost:1/0"), ECHO)._script is None


def test_a_restarted_server_is_asked_again_and_an_absent_one_is_an_error(tmp_path) -> None:
    async def run() -> None:
        server = start_local_valkey(tmp_path)
        line = ScriptLine(redis := connect(server.url), ECHO)
        try:
            assert await line.call("{k}", 1) == [b"{k}", b"1"]
            server.stop()
            for _ in range(2):
                with pytest.raises(FAILURES):
                    await line.call("{k}", 2)
            server = start_local_valkey(tmp_path)
            assert await line.call("{k}", 3) == [b"{k}", b"3"]
        finally:
            line.close()
            await redis.aclose()
            server.stop()

    asyncio.run(run())


class Server:
    """Answers each connection's first bytes with the next of `answers`; None: hangs up. Then it is silent."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers, self.connections = list(answers), 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.read(65_536):
                answer = self.answers.pop(0) if self.answers else b""
                if answer is None:
                    return
                writer.write(answer)
        finally:
            writer.close()


async def against(server: Server, test: Callable[[ScriptLine], Awaitable[None]]) -> None:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    await with_line(connect(f"redis://127.0.0.1:{port}/0"), test)
    listening.close()
    await listening.wait_closed()


def test_a_kept_connection_that_ends_under_a_call_is_made_again_once() -> None:
    async def run(line: ScriptLine) -> None:
        assert await line.call("k", 1) == 1
        assert await line.call("k", 2) == 2
        with pytest.raises(ConnectionLost):
            await line.call("k", 3)

    server = Server(b":1\r\n", None, b":2\r\n", None, None)
    asyncio.run(against(server, run))
    assert server.connections == 3


def test_a_silent_server_is_given_up_by_the_deadline_and_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_line, "CALL_TIMEOUT_S", 0.1)

    async def run(line: ScriptLine) -> None:
        assert await line.call("k", 1) == 1
        with pytest.raises(TimeoutError):  # a caller with less patience leaves the connection as it is
            async with asyncio.timeout(0.02):
                await line.call("k", 2)
        with pytest.raises(RedisTimeout):
            await line.call("k", 3)
        assert await line.call("k", 4) == 4

    server = Server(b":1\r\n", b"", b"", b":4\r\n")
    asyncio.run(against(server, run))
    assert server.connections == 2


@pytest.mark.parametrize("answer", [b"nonsense\r\n", b":1\r\n:2\r\n"])
def test_a_server_that_breaks_the_form_is_hung_up_on(answer: bytes) -> None:
    async def run(line: ScriptLine) -> None:
        outcome = await asyncio.gather(line.call("k", 1), return_exceptions=True)
        assert outcome == [1] or isinstance(outcome[0], InvalidResponse)
        assert await line.call("k", 2) == 7

    server = Server(answer, b":7\r\n")
    asyncio.run(against(server, run))
    assert server.connections == 2
