"""The one connection that a worker asks Redis on, checked before anything rests on it.

Nothing is repeated by the driver. A request that failed, or may have failed, ends the session.
"""

import asyncio
import re
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from redis import exceptions
from redis.asyncio.connection import Connection, parse_url

from ...timing import Timing
from .address import RedisStore
from .farewell import Farewell
from .scripts import Script
from .server import check, explain, information

# Connecting holds up nobody, so it may take longer than a short lease would allow.
SETUP_TIMEOUT = 5.0


def make_connection(store: RedisStore, at: tuple[str, int] | None = None) -> Any:
    """A connection of redis-py (only half typed) that has not been made yet. It retries nothing, and waits for as long as
    its user lets it."""
    options: dict[str, Any] = {**parse_url(store.url)}
    kind = options.pop("connection_class", Connection)
    if at is not None:
        host, options["port"] = at
        options["host"] = host or options.get("host", "localhost")  # a node that does not know its own name gives none
    # RESP2: the newer protocol's unasked-for messages have no use here.
    options |= {"protocol": 2, "decode_responses": True, "encoding_errors": "replace"}
    options |= {"socket_timeout": None, "socket_connect_timeout": None, "health_check_interval": 0}
    return kind(**options)


async def introduce(connection: Any, label: str) -> None:
    """Connect, and show in CLIENT LIST who this is, where that is allowed."""
    await connection.connect()
    await connection.send_command("CLIENT", "SETNAME", label)
    with suppress(exceptions.ResponseError):
        await connection.read_response()


def drop(connection: Any) -> None:
    """Close at once. A polite close may hang for as long as the network does."""
    connection._close()


def _moved_to(error: exceptions.ResponseError) -> tuple[str, int] | None:
    """Where a cluster's node sends its asker. Read from the text: older drivers have no class of errors for it here."""
    found = re.search(r"^(?:MOVED )?\d+ (.*):(\d+)$", str(error))
    return (found[1], int(found[2])) if found else None


class Session:
    """A checked connection. Whatever goes wrong on it must end it (`terminate`): an answer may still be on its way."""

    def __init__(self, store: RedisStore, connection: Any, timing: Timing) -> None:
        self._store = store
        self._connection = connection
        self._timeout = timing.request_timeout
        self._one_at_a_time = asyncio.Lock()
        self._farewell: Farewell | None = None

    @classmethod
    async def open(cls, store: RedisStore, timing: Timing, label: str, key: str) -> "Session":
        """`key` is one of those to be used: in a cluster, the node that has it is the one to talk to."""
        try:
            async with asyncio.timeout(max(SETUP_TIMEOUT, timing.request_timeout)):
                try:
                    return await cls._open(store, timing, label, key, None)
                except exceptions.ResponseError as error:
                    node = _moved_to(error)
                    if node is None:
                        raise
                    return await cls._open(store, timing, label, key, node)
        except Exception as error:
            raise explain(error, store) from None

    @classmethod
    async def _open(
        cls, store: RedisStore, timing: Timing, label: str, key: str, at: tuple[str, int] | None
    ) -> "Session":
        connection = make_connection(store, at)
        session = cls(store, connection, timing)
        try:
            await introduce(connection, label)
            check(store, information(await session._call("INFO")))
            await session._call("EXISTS", key)
        except BaseException:
            drop(connection)
            raise
        return session

    @property
    def alive(self) -> bool:
        """Not a proof of anything: a cut connection may look alive for a moment."""
        reader, writer = self._connection._reader, self._connection._writer
        return bool(reader and writer and not reader.at_eof() and not writer.is_closing())

    async def run(self, script: Script, keys: Sequence[str], *arguments: str) -> Any:
        """Run a script, in bounded time. After any error the session must be terminated: it may or may not have run."""
        return await self._bounded(self._evaluate(script, keys, arguments))

    async def look_at_the_server(self) -> dict[str, str]:
        """What the server tells of itself."""
        server: dict[str, str] = await self._bounded(self._ask_about_itself())
        return server

    def part(self, script: Script, keys: Sequence[str], *arguments: str) -> None:
        """Close, and let a script run if the server can still be reached: nobody waits for it or hears of it. Whoever
        waits for an answer hears that the connection is closed."""
        connection = self._connection
        reader, writer = connection._reader, connection._writer
        # What would have to queue here would keep a dead connection open.
        if not self.alive or writer.transport.get_write_buffer_size():
            self.terminate()
            return
        writer.writelines(connection.pack_command("EVAL", script.text, str(len(keys)), *keys, *arguments))
        if not writer.can_write_eof():  # TLS takes leave of the server by itself
            self.terminate()
            return
        connection._reader = connection._writer = None
        reader.feed_eof()
        self._farewell = Farewell(writer, self._timeout)

    async def parted(self) -> None:
        """Until the last words are heard, or given up."""
        if self._farewell is not None:
            await asyncio.wait([self._farewell.ended])

    def terminate(self) -> None:
        drop(self._connection)

    async def close(self) -> None:
        async with asyncio.timeout(self._timeout):
            await self._connection.disconnect()

    async def _bounded(self, request: Coroutine[Any, Any, Any]) -> Any:
        try:
            async with self._one_at_a_time, asyncio.timeout(self._timeout):
                return await request
        except Exception as error:
            raise explain(error, self._store) from None
        finally:
            request.close()  # it may not even have begun

    async def _ask_about_itself(self) -> dict[str, str]:
        server = information(await self._call("INFO"))
        with suppress(exceptions.ResponseError):  # not everybody may ask for the rest
            server["appendfsync"] = (await self._call("CONFIG", "GET", "appendfsync"))[1]
        return server

    async def _evaluate(self, script: Script, keys: Sequence[str], arguments: Sequence[str]) -> Any:
        try:
            return await self._call("EVALSHA", script.sha, str(len(keys)), *keys, *arguments)
        except exceptions.NoScriptError:
            # The server has not seen it yet, or has forgotten it: so it has not run.
            return await self._call("EVAL", script.text, str(len(keys)), *keys, *arguments)

    async def _call(self, *command: str) -> Any:
        # Left to itself a closed connection would connect again, unchecked.
        if not self.alive:
            raise exceptions.ConnectionError("the connection was closed")
        await self._connection.send_command(*command)
        return await self._connection.read_response(disconnect_on_error=False)
