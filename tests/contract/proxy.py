"""A wire between a worker and PostgreSQL that freezes at a chosen message, as a stopped process would."""

import asyncio
import struct
from types import TracebackType

_ASKS_FOR_TLS = struct.pack("!i", 80877103)


class FreezingProxy:
    """Forwards whole protocol messages. Frozen, it keeps both connections open and moves nothing in either direction."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._wanted: str | None = None
        self.frozen = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "FreezingProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def freeze(self, *, at_parse: bool) -> None:
        """Freeze when the client's next request is through; with `at_parse`, between its Parse and its Bind if it has one."""
        self._wanted = "P" if at_parse else "S"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        to_server = await asyncio.open_connection(*self._target)
        pumps = asyncio.gather(self._requests(reader, to_server[1]), self._answers(to_server[0], writer))
        try:
            await pumps
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            pass
        finally:
            writer.close()
            to_server[1].close()

    async def _requests(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        kind = b""  # the messages before the session's start have no type
        while True:
            head = await source.readexactly(4)
            body = await source.readexactly(struct.unpack("!i", head)[0] - 4)
            sink.write(kind + head + body)
            await sink.drain()
            if self._wanted is not None and (kind == b"S" or (self._wanted == "P" and kind == b"P")):
                if kind == b"P":
                    sink.write(b"H" + struct.pack("!i", 4))
                    await sink.drain()
                self.frozen = True
                await asyncio.Event().wait()
            if body != _ASKS_FOR_TLS:
                kind = await source.readexactly(1)

    async def _answers(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            if self.frozen:
                await asyncio.Event().wait()
            sink.write(data)
            await sink.drain()
        raise asyncio.IncompleteReadError(b"", None)
