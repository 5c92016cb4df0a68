"""Answers whoever asks for a job's runs, as many as ask at once, at no risk for the leadership.

Readers share the worker's one connection. So they take turns, or a renewal would wait behind all of them; a question on its way
is never cut short, or the doubt would end the term; and while the store does not answer nobody waits for long.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from .backends import Backend
from .errors import StoreError
from .records import RunView
from .timing import Timing

_PATIENCE = 5.0


class Reader:
    """`is_away` tells whether the store is known not to answer."""

    def __init__(self, backend: Backend, detail: str, timing: Timing, is_away: Callable[[], bool]) -> None:
        self._backend = backend
        self._detail = detail
        self._patience = max(_PATIENCE, 2 * timing.request_timeout)
        self._is_away = is_away
        self._turn = asyncio.Lock()

    async def runs(self, job: str, limit: int, before: datetime | None) -> list[RunView]:
        """A job's runs, the newest first; `StoreError`, in bounded time, if the store does not answer."""
        away = StoreError(f"{self._detail} does not answer.", hint="ask again later; the status tells how it is.")
        if self._is_away():
            raise away
        try:
            async with asyncio.timeout(self._patience):
                await self._turn.acquire()
                reading = asyncio.create_task(self._backend.runs(job, limit, _in_utc(before)))
                reading.add_done_callback(self._has_read)
                return await asyncio.shield(reading)
        except TimeoutError:
            raise away from None

    def _has_read(self, reading: "asyncio.Task[list[RunView]]") -> None:
        self._turn.release()
        if not reading.cancelled():
            reading.exception()  # perhaps nobody waits for it any more


def _in_utc(moment: datetime | None) -> datetime | None:
    try:
        return moment.astimezone(UTC) if moment is not None else None
    except OverflowError:  # at the very edge of time
        return moment and moment.replace(tzinfo=UTC)
