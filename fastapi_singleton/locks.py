"""Mutual exclusion for any code: a named lock, held in the whole fleet by one holder, for as long as it is renewed.

A lock is a leadership of its own, under a name of its own, with everything that makes a leadership safe: the store ends it
when its holder is gone, its token grows, and the holder stops trusting in it before the store does. Each holding has its own
identity and its own connection, so that two coroutines of one worker exclude each other like any two workers.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Literal
from urllib.parse import quote

from .backends import Backend, Store
from .errors import ConfigurationError, LockHeldError, StoreError
from .records import LOCK_PREFIX, Term, Worker
from .timing import Timing, boot_clock

logger = logging.getLogger("fastapi_singleton")

_UNNAMED = 10  # times that a lock is tried for whose holder cannot be named


class Lock:
    """A lock in hand. Look at `lost` before each step that must not be done twice; `token` grows with every holder. Unless it
    is renewed meanwhile it is lost at `trusted_until`, by the boot's clock."""

    def __init__(self, backend: Backend, term: Term, timing: Timing, sent: float, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._term = term
        self._timing = timing
        self._clock = clock
        self.trusted_until = sent + timing.trust
        self._lost = asyncio.Event()

    @property
    def token(self) -> int:
        return self._term.token

    @property
    def lost(self) -> bool:
        """Whether somebody else may hold it by now. Once true, it stays so."""
        if not self._lost.is_set() and self._clock() >= self.trusted_until:
            self._lost.set()
        return self._lost.is_set()

    async def wait_lost(self) -> None:
        """Until the lock is lost, or may be."""
        while not self.lost:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), max(0.001, self.trusted_until - self._clock()))

    async def keep(self) -> None:
        """Renew until it is lost or this is cancelled. A lost lock is never renewed back."""
        try:
            await self._renew()
        finally:
            self._lost.set()

    async def _renew(self) -> None:
        while not self.lost:
            await self._backend.vacancy(self._timing.renew_every)
            sent = self._clock()
            if self.lost:
                break
            try:
                kept = await self._backend.renew(self._term)
            except StoreError as error:
                logger.warning("The lock %s was lost: %s", self._term.name, error)
                break
            if not kept or self.lost:
                logger.warning("The lock %s was lost: the store has ended it", self._term.name)
                break
            self.trusted_until = sent + self._timing.trust

    async def release(self) -> None:
        """Let go of it; at once for everybody who waits, if the store can be told. One that is lost may be free by now, and
        somebody else's: that one is not touched."""
        with suppress(StoreError):
            await self._backend.release(self._term)
        self._lost.set()


def lock_name(fleet: str, kind: Literal["lock", "once", "run"], name: str) -> str:
    """No two of these are the same."""
    return f"{quote(fleet, safe='')}:{kind}:{name}"


@asynccontextmanager
async def hold(
    store: Store, name: str, timing: Timing, wait: float, *, clock: Callable[[], float] = boot_clock
) -> AsyncIterator[Lock]:
    """Hold the lock of that name while the block lasts. Raises `LockHeldError` if somebody else has it for longer than
    `wait` seconds, and `StoreError` if the store does not answer for as long: the block never runs unlocked."""
    backend = store.open(f"{LOCK_PREFIX}{name}", Worker.here(), timing)
    try:
        term, sent = await _acquire(backend, name, timing, clock() + wait, clock)
        lock = Lock(backend, term, timing, sent, clock)
        keeping = asyncio.create_task(lock.keep(), name=f"fastapi_singleton:lock:{name}")
        try:
            yield lock
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await lock.release()
    finally:
        await backend.close()
        backend.forfeit()


async def _acquire(
    backend: Backend, name: str, timing: Timing, deadline: float, clock: Callable[[], float]
) -> tuple[Term, float]:
    failures = unnamed = 0
    while True:
        try:
            await backend.connect()
            sent = clock()
            if (term := await backend.acquire()) is not None:
                return term, sent
            failures = 0
        except StoreError:
            failures += 1
            if clock() >= deadline:
                raise
        left = deadline - clock()
        if left <= 0 and not failures:
            leader = backend.fleet.leader
            if leader is None and unnamed < _UNNAMED:
                # Somebody has it who has not yet told, or is just letting go: nobody could be named, so ask again.
                unnamed += 1
                await asyncio.sleep(0.02)
                continue
            raise LockHeldError(name.split(":", 2)[-1], leader.worker if leader is not None else None)
        pause = timing.backoff(failures) if failures else timing.jittered(timing.poll)
        await (asyncio.sleep(min(pause, max(left, 0.01))) if failures else backend.vacancy(min(pause, left)))


def check_wait(wait: float) -> None:
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < 86_400 * 365:
        raise ConfigurationError(f"wait={wait!r} is not a duration.", hint="pass seconds: 0 for not at all.")
