"""Everything a worker writes into the ledger, each item until the store has answered it.

Claims that wait at the same moment share one round trip; so do endings. Interleavings that could hurt, and their answers:

- *The reply to a claim is lost.* The same claim, with the same nonce, is sent again until it is answered: the first may
  still be on its way in the server, so that reading could not tell. One more time if it is then refused because a newer
  term has begun: only a question asked after that term's beginning is sure to see a first claim that came in before it.
- *The term ends while claims wait.* They carry its token, and the store refuses it, unless the claim had come through.
- *The asker has given up waiting* (its task was cancelled). A claim that came through nevertheless is written down as
  abandoned, or it would stay `running` for as long as this worker lives.
- *The store is away when a run ends.* Its ending waits here; the slot it ran in is free.
- *A run ends while the next claim of its job waits.* Its ending is written first, or the claim would count it as alive.
- *As many runs are alive as may be*, says the store. Whether they are is for whoever asks to say: a process on this host may
  be dead, or frozen, whatever the store has last seen of it. The claim is then sent once more without the dead, or
  written down as skipped; the store counts and enters in one step each time.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from .backends import Backend, Store
from .errors import StoreError
from .processes import provably_alive, provably_dead
from .records import UNBEGUN, Alive, Crowd, Ending, Entry, Term, Verdict, Worker
from .timing import Timing

logger = logging.getLogger("fastapi_singleton")

# Rows per statement: large enough for a thousand jobs due together, small enough for the statement to be quick.
_BATCH = 1000
_STUBBORN = 5  # failures in a row
_KEPT = 30 * 86_400.0  # seconds for which rows are kept where there is nobody whose `keep_runs` would say


@dataclass(slots=True)
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
        self._failures = 0
        self.problem: str | None = None

    def enter(self, entry: Entry) -> "asyncio.Future[Verdict]":
        """Write an entry, however long it takes; the verdict is beyond doubt."""
        asked = _Asked(entry, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        self._wake()
        return asked.answer

    def remark(self, entries: Iterable[Entry]) -> None:
        """Write entries that nobody waits for."""
        for entry in entries:
            self.enter(entry)

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
        while True:
            await self._work.wait()
            held = False
            try:
                # What waits to begin comes first; what has ended can wait, but for a claim that would count it.
                if self._endings and not self._claimed_jobs.isdisjoint(e.entry.job for e in self._endings.values()):
                    await self._write_endings()
                await self._write_entries()
                held = await self._write_endings() if not self._asked else False
                self._failures, self.problem = 0, None
            except StoreError as error:
                self._fail(str(error))
            except Exception as error:
                self._fail(f"The ledger failed unexpectedly ({type(error).__name__}); see the log of this worker.")
                logger.exception("Unexpected error in the ledger; trying again")
            if not self._asked and not self._endings:
                self._work.clear()
                self._idle.set()
            elif self._failures or (held and not self._asked):
                await asyncio.sleep(self._timing.backoff(self._failures or 1))

    def _fail(self, problem: str) -> None:
        # The election tells of a store that is away; what goes on failing here while the store answers there is our own.
        self._failures += 1
        if self._failures == _STUBBORN:
            logger.error("What has been run cannot be written down: %s", problem)
        if self._failures >= _STUBBORN:
            self.problem = problem

    def close(self) -> None:
        """Nobody writes any more: whoever still waits hears that the term is over."""
        for asked in self._asked:
            if not asked.answer.done():
                asked.answer.set_result(Verdict.LOST)
        self._asked.clear()

    @property
    def _claimed_jobs(self) -> set[str]:
        return {asked.entry.job for asked in self._asked if asked.entry.limit is not None}

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
            verdicts = await self._judge([asked.entry for asked in batch])
        except BaseException:
            for asked in batch:
                asked.in_doubt = True
            if self._failures < _STUBBORN:
                self._asked.extendleft(reversed(batch))
            else:
                self._asked.extend(batch)
            raise
        for asked, verdict in zip(batch, verdicts, strict=True):
            if verdict is Verdict.LOST and asked.in_doubt:
                asked.in_doubt = False
                self._asked.append(asked)
                continue
            if verdict is Verdict.TAKEN and asked.in_doubt and asked.entry.outcome == "running":
                # Perhaps by this very claim, given up for dead before anybody heard of it: it must not count as alive.
                self.end(Ending(asked.entry, "abandoned", 0.0, UNBEGUN))
            if not asked.answer.done():
                asked.answer.set_result(verdict)
            elif verdict is Verdict.YOURS:
                self.end(Ending(asked.entry, "abandoned", 0.0, UNBEGUN))

    async def _judge(self, entries: Sequence[Entry]) -> list[Verdict]:
        """Enter them, those that find too many runs alive as skipped."""
        answers: dict[int, Verdict | Crowd] = dict(enumerate(await self._backend.enter(entries)))
        crowds = _crowds(answers)
        if beside := {run.worker for crowd in crowds.values() for run in crowd.alive if not _counts(run)}:
            again = await self._backend.enter([entries[i] for i in crowds], beside)
            answers.update(zip(crowds, again, strict=True))
            crowds = _crowds(answers)
        # A repeat is tried again until there is room; a row would use it up.
        answers.update((i, Verdict.FULL) for i in crowds if entries[i].cause == "rerun")
        if crowds := _crowds(answers):
            skipped = await self._backend.enter([_as_skipped(entries[i], crowd) for i, crowd in crowds.items()])
            answers.update(
                (i, Verdict.FULL if verdict is Verdict.WRITTEN else verdict)
                for i, verdict in zip(crowds, skipped, strict=True)
            )
        return [answer for answer in answers.values() if isinstance(answer, Verdict)]

    def _next_batch(self) -> list[_Asked]:
        """As many as fit, no two that one statement could not judge between: for the same tick and attempt, or for the
        same job if runs of it are counted."""
        batch: list[_Asked] = []
        later: list[_Asked] = []
        taken: set[object] = set()
        # After several failures one at a time: something about one of them may be what fails.
        most = _BATCH if self._failures < _STUBBORN else 1
        while self._asked and len(batch) < most:
            asked = self._asked.popleft()
            if asked.answer.done() and not asked.in_doubt:
                continue
            keys = {asked.entry.key} if asked.entry.limit is None else {asked.entry.key, asked.entry.job}
            if taken.isdisjoint(keys):
                taken |= keys
                batch.append(asked)
            else:
                later.append(asked)
        self._asked.extendleft(reversed(later))
        return batch


@asynccontextmanager
async def open_ledger(
    store: Store, name: str, timing: Timing, keep: float = _KEPT
) -> AsyncIterator[tuple[Backend, Ledger]]:
    """The ledger of a fleet for somebody who does not want to lead it, and is seen in it while this lasts, so that no run
    of its is given up. What was written is flushed at the end."""
    backend = store.open(name, Worker.here(role="guest"), timing)
    ledger = Ledger(backend, timing)
    tasks: list[asyncio.Task[None]] = []
    try:
        await backend.attend()
        fleet = backend.fleet
        if not fleet.jobs and all(worker.role == "guest" for worker in fleet.workers):
            # Nobody else will: a fleet of cron lines has no leader to do it. Where there were jobs, an application is away
            # for a while; it alone knows for how long rows are kept, and whether it was the store that was away.
            nobody = Term.race(name, "")
            await give_up_the_gone(backend, nobody)
            await backend.prune(nobody, keep)
        tasks = [asyncio.create_task(ledger.run()), asyncio.create_task(_stay(backend, timing))]
        try:
            yield backend, ledger
        finally:
            # Also if whoever asks was interrupted: a claim that nobody waits for any more is written down as such.
            if left := await ledger.flush(4 * timing.request_timeout):
                logger.warning("The store did not take the endings of %d run(s)", left)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await backend.close()
        backend.forfeit()


async def give_up_the_gone(backend: Backend, term: Term) -> int:
    """Give up the unfinished runs of workers that have not been seen for a whole lease; how many."""
    unseen = await backend.unseen(term)
    # Whether such a run still counts is for those to say who can know: here it is enough that it may.
    silent = [worker for worker, process in unseen.items() if process and not provably_dead(process)]
    return await backend.sweep(term, silent) if unseen else 0


def _crowds(answers: Mapping[int, Verdict | Crowd]) -> dict[int, Crowd]:
    return {i: answer for i, answer in answers.items() if isinstance(answer, Crowd)}


def _counts(run: Alive) -> bool:
    """Whether a run is to be taken for alive: its worker was seen within its lease and is not known to be dead, or it was
    not and is known to live."""
    return not provably_dead(run.process) if run.seen else provably_alive(run.process)


def _as_skipped(entry: Entry, crowd: Crowd) -> Entry:
    where = ", ".join(sorted({run.worker for run in crowd.alive}))
    return replace(entry, outcome="skipped", error=f"max_instances={entry.limit} runs of it were alive, on {where}")


async def _stay(backend: Backend, timing: Timing) -> None:
    while True:
        await asyncio.sleep(timing.renew_every)
        with suppress(StoreError):
            await backend.attend()
