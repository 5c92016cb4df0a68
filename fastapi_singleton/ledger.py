"""Everything a worker writes into the ledger, each item until the store has answered it.

Claims that wait at the same moment share one round trip; so do endings. Interleavings that could hurt, and their answers:

- *The reply to a claim is lost.* The same claim, with the same nonce, is sent again until it is answered: the first may
  still be on its way in the server, so that reading could not tell. One more time if it is then refused because a newer
  term has begun: only a question asked after that term's beginning is sure to see a first claim that came in before it.
- *The term ends while claims wait.* They carry its token, and the store refuses it, unless the claim had come through.
- *The asker has given up waiting* (its task was cancelled). A claim that came through nevertheless is written down as
  abandoned, or it would stay `running` for as long as this worker lives.
- *The store is away when a run ends.* Its ending waits here; the slot it ran in is free.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from .backends import Backend, Store
from .errors import StoreError
from .records import Ending, Entry, Verdict, Worker
from .timing import Timing

logger = logging.getLogger("fastapi_singleton")

# Rows per statement: large enough for a thousand jobs due together, small enough for the statement to be quick.
_BATCH = 1000


@dataclass
class _Asked:
    entry: Entry
    answer: "asyncio.Future[Verdict]"
    in_doubt: bool = False  # sent before, and the reply was lost


class Ledger:
    """One worker's pen. To be used on the event loop it was made on."""

    def __init__(self, backend: Backend, timing: Timing) -> None:
        self._backend = backend
        self._timing = timing
        self._asked: deque[_Asked] = deque()
        self._endings: dict[str, Ending] = {}
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def enter(self, entry: Entry) -> Verdict:
        """Write an entry, however long it takes; the verdict is beyond doubt."""
        return await self._ask(entry)

    def remark(self, entries: Iterable[Entry]) -> None:
        """Write entries that nobody waits for."""
        for entry in entries:
            self._ask(entry)

    def end(self, ending: Ending) -> None:
        """Note how a claimed run ended; it is written down as soon as the store takes it."""
        self._endings[ending.entry.nonce] = ending
        self._wake()

    async def flush(self, timeout: float) -> int:
        """Wait until everything is written; how many items are left after `timeout`."""
        await asyncio.sleep(0)  # what threads have handed over by now counts
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            pass
        return len(self._asked) + len(self._endings)

    async def run(self) -> None:
        """Write until cancelled. Nothing the store does ends it."""
        failures = 0
        while True:
            await self._work.wait()
            held = False
            try:
                # What waits to begin comes first; what has ended can wait.
                await self._write_entries()
                held = await self._write_endings() if not self._asked else False
                failures = 0
            except StoreError:
                failures += 1  # the election tells about the store
            except Exception:
                failures += 1
                logger.exception("Unexpected error in the ledger; trying again")
            if not self._asked and not self._endings:
                self._work.clear()
                self._idle.set()
            elif failures or (held and not self._asked):
                await asyncio.sleep(self._timing.backoff(failures or 1))

    def close(self) -> None:
        """Nobody writes any more: whoever still waits hears that the term is over."""
        for asked in self._asked:
            if not asked.answer.done():
                asked.answer.set_result(Verdict.LOST)
        self._asked.clear()

    def _ask(self, entry: Entry) -> "asyncio.Future[Verdict]":
        asked = _Asked(entry, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        self._wake()
        return asked.answer

    def _wake(self) -> None:
        self._idle.clear()
        self._work.set()

    async def _write_endings(self) -> bool:
        endings = list(self._endings.values())[:_BATCH]
        if not endings:
            return False
        held = await self._backend.finish(endings)
        for ending in endings:
            nonce = ending.entry.nonce
            if nonce not in held:
                del self._endings[nonce]
            else:  # behind the others, or it would keep them from being written
                self._endings[nonce] = self._endings.pop(nonce)
        return bool(held)

    async def _write_entries(self) -> None:
        batch = self._next_batch()
        if not batch:
            return
        try:
            verdicts = await self._backend.enter([asked.entry for asked in batch])
        except BaseException:
            for asked in batch:
                asked.in_doubt = True
            self._asked.extendleft(reversed(batch))
            raise
        for asked, verdict in zip(batch, verdicts, strict=True):
            if verdict is Verdict.LOST and asked.in_doubt:
                asked.in_doubt = False
                self._asked.append(asked)
            elif not asked.answer.done():
                asked.answer.set_result(verdict)
            elif verdict is Verdict.YOURS:
                self.end(Ending(asked.entry, "abandoned", 0.0, "its worker stopped before it began"))

    def _next_batch(self) -> list[_Asked]:
        """As many as fit, no two for the same tick and attempt: one statement cannot judge between those."""
        batch: dict[tuple[object, ...], _Asked] = {}
        later: list[_Asked] = []
        while self._asked and len(batch) < _BATCH:
            asked = self._asked.popleft()
            if asked.answer.done() and not asked.in_doubt:
                continue
            if batch.setdefault(asked.entry.key, asked) is not asked:
                later.append(asked)
        self._asked.extendleft(reversed(later))
        return list(batch.values())


@asynccontextmanager
async def open_ledger(store: Store, name: str, timing: Timing) -> AsyncIterator[tuple[Backend, Ledger]]:
    """The ledger of a fleet for somebody who does not want to lead it, and is seen in it while this lasts, so that no run
    of its is given up. What was written is flushed at the end."""
    backend = store.open(name, Worker.here(), timing)
    ledger = Ledger(backend, timing)
    tasks: list[asyncio.Task[None]] = []
    try:
        await backend.attend()
        tasks = [asyncio.create_task(ledger.run()), asyncio.create_task(_stay(backend, timing))]
        yield backend, ledger
        if left := await ledger.flush(4 * timing.request_timeout):
            logger.warning("The store did not take the endings of %d run(s)", left)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await backend.close()
        backend.forfeit()


async def _stay(backend: Backend, timing: Timing) -> None:
    while True:
        await asyncio.sleep(timing.renew_every)
        with suppress(StoreError):
            await backend.attend()
