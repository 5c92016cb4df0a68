"""How a connection is left with last words that nobody waits for."""

import asyncio
from typing import Any


class Farewell(asyncio.Protocol):
    """Takes over a connection after its last words, and keeps it open until the server has read them and hangs up: closing
    at once, with an answer unread, would make the network throw away what is still under way. `patience` bounds it."""

    def __init__(self, writer: asyncio.StreamWriter, patience: float) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._writer = writer  # not to be collected before its transport is closed
        transport: Any = writer.transport  # typed as one that can only be written to
        self._timer = loop.call_later(patience, transport.abort)
        transport.set_protocol(self)
        transport.resume_reading()
        writer.write_eof()

    def eof_received(self) -> bool:
        return False  # so that the transport closes itself

    def connection_lost(self, _: Exception | None) -> None:
        self._timer.cancel()
        if not self.ended.done():
            self.ended.set_result(None)
