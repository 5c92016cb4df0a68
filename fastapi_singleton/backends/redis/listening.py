"""Hears of hand-overs on a connection of its own, which is all a subscribed connection is good for.

A hint, as everything that wakes a standby: where there is no listening (no right to the channel, no connection left) the
poll goes on, only slower.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ...errors import StoreError
from ...timing import Timing, boot_clock
from .address import RedisStore
from .server import explain
from .session import SETUP_TIMEOUT, drop, introduce, make_connection

logger = logging.getLogger("fastapi_singleton")

_AT_MOST_EVERY = 0.1  # a new connection, if something cuts each one as soon as it is made


class Listener:
    """Calls `hear` for each message of others on the channel, and when its connection is cut. `own` is what this worker
    itself says there: no news to it."""

    def __init__(
        self, store: RedisStore, timing: Timing, label: str, channel: str, own: str, hear: Callable[[], None]
    ) -> None:
        self._store = store
        self._timing = timing
        self._label = label
        self._channel = channel
        self._own = own
        self._hear = hear
        self._task: asyncio.Task[None] | None = None
        self._connection: Any = None
        self._try_again_at = 0.0
        self._said_deaf = False
        self._closed = False

    async def listen(self) -> None:
        """See that somebody listens. Never raises because the store does not allow it; tries again after a lease."""
        if self._closed or (self._task is not None and not self._task.done()) or boot_clock() < self._try_again_at:
            return
        try:
            connection = await self._subscribe()
        except StoreError as error:
            self._try_again_at = boot_clock() + self._timing.lease
            level = logging.DEBUG if self._said_deaf else logging.WARNING
            logger.log(level, "Hand-overs are noticed by polling only: %s", error)
            self._said_deaf = True
            return
        if self._closed:  # only just
            drop(connection)
            return
        self._try_again_at = boot_clock() + _AT_MOST_EVERY
        self._connection = connection
        self._task = asyncio.create_task(self._follow(connection), name=f"fastapi_singleton:listening:{self._channel}")

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            drop(self._connection)  # a task that never came to run closes nothing
            await asyncio.wait([self._task])

    async def _subscribe(self) -> Any:
        connection = make_connection(self._store)
        try:
            async with asyncio.timeout(SETUP_TIMEOUT):
                await introduce(connection, self._label)
                await connection.send_command("SUBSCRIBE", self._channel)
                await connection.read_response()
        except BaseException as error:
            drop(connection)
            if isinstance(error, Exception):
                raise explain(error, self._store) from None
            raise
        return connection

    async def _follow(self, connection: Any) -> None:
        try:
            while True:
                *_, said = await connection.read_response()
                if said != self._own:
                    self._hear()
        except Exception:
            # Whatever cut this connection may have cut the other: reason enough to ask.
            self._hear()
        finally:
            drop(connection)
