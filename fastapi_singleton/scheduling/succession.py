"""From leader to leader: what a new one owes for the time before it, and what it looks after while it leads.

Where the fleet's memory and this worker's code disagree about a job, memory wins: a paused job stays paused, a removed one
removed, an interval keeps the phase that the first leader gave it. A changed schedule starts afresh.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from apscheduler.events import EVENT_JOB_SUBMITTED, JobSubmissionEvent
from apscheduler.executors.base import MaxInstancesReachedError

from ..backends import Backend
from ..catching_up import INSTANT, fingerprint
from ..errors import StoreError
from ..ledger import Ledger, give_up_the_gone
from ..records import Entry, JobChange, JobState, Term
from ..timing import boot_clock
from . import stock
from .gate import Due, Gate
from .guard import Guard
from .repeating import Repeating
from .settling import Settling

logger = logging.getLogger("fastapi_singleton")

Answer = TypeVar("Answer")

_SETTLE_EVERY = 60.0


class Succession:
    """One worker's terms, one after the other. Used on the event loop.

    What it has under way when a term ends is never cancelled: a question in flight shares the session with the renewals
    that go on while running jobs are waited for. It finds out itself that the term is over, before it does anything more.
    """

    def __init__(
        self, gate: Gate, executor: Callable[[str], Guard], scheduler: Any, backend: Backend, ledger: Ledger,
        lease: float, keep_runs: float, settling: Settling,
        is_steady: Callable[[], bool], dates: dict[str, Any], *, racing: bool,
    ) -> None:  # fmt: skip
        self._gate = gate
        self._executor = executor
        self._scheduler = scheduler
        self._backend = backend
        self._ledger = ledger
        self._lease = lease
        self._keep_runs = keep_runs
        self._settling = settling
        self._is_steady = is_steady
        self._racing = racing
        self._owes = False  # the take-over has yet to be done
        self._started_at: datetime | None = None
        self._paused: dict[str, bool] = {}  # as the fleet was told
        self._triggers: dict[str, Any] = {}
        self._removed: set[str] = set()
        self._repeating = Repeating(gate, backend, ledger, self._jobs, dates, self._submit)
        self._tidied_at = self._settled_at = 0.0
        self._term: Term | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._work: asyncio.Task[None] | None = None  # taking over, or looking after
        self._repeats: tuple[Term, asyncio.Task[None]] | None = None

    def begin(self, term: Term, started_at: datetime | None) -> None:
        """A term begins. `started_at` tells when the scheduler was started for it, by the store's clock, and is None if it
        was resumed."""
        self._term = term
        if started_at is not None:
            self._paused.clear()
            self._removed.clear()
        self._tidied_at = 0.0
        self._owes, self._started_at = True, started_at
        self._work = self._start(self._take_over(term, started_at))

    def end(self) -> None:
        """The term is over: nothing more begins under it."""
        self._term = None

    async def close(self, timeout: float) -> None:
        """Wait for what is under way, that long at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(task := asyncio.create_task(work))
        return task

    async def _ask(self, term: Term, asking: Awaitable[Answer]) -> Answer:
        """The answer, unless the term is over by the time it comes."""
        answer = await asking
        if self._term is not term:
            raise StoreError("The term is over.", hint="nothing to do.")
        return answer

    def go_on(self) -> None:
        """Called at each renewal. Raises what has gone wrong unforeseen, so that this worker resigns."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error
        if self._term is not None and self._work is not None and self._work.done():
            # Owed: the store failed in the middle of it, and this worker's part went on: in a race there is no term to lose.
            work = self._take_over(self._term, self._started_at) if self._owes else self._look_after(self._term)
            self._work = self._start(work)

    def removed(self, key: str) -> None:
        """The application removed a job."""
        self._removed.add(key)
        self._paused.pop(key, None)

    def hurry(self) -> None:
        """The application did something to a job: the fleet is told now, or at the next renewal."""
        if self._term is not None and self._work is not None and self._work.done() and not self._work.cancelled():
            self.go_on()

    # -- taking over -------------------------------------------------------------------------------------------------

    async def _take_over(self, term: Term, started_at: datetime | None) -> None:
        try:
            jobs = self._jobs()
            # What the application did to its jobs here while nobody could be told.
            await self._note_changes(term, jobs)
            states = await self._meet(term, jobs)
            now = self._backend.now()
            known = await self._known(term, jobs, states, now)
            due: list[tuple[Any, list[Due]]] = []
            remarks: list[Entry] = []
            for key, job in jobs.items():
                await self._ask(term, asyncio.sleep(0))  # renewals and requests go on between any two jobs
                try:
                    ticks, reasons = self._settling.settle(term, job, states[key], known[key], now, started_at)
                except Exception:
                    logger.exception("Job %s could not be caught up on", key)
                    continue
                due.append((job, ticks))
                remarks += reasons
            self._scheduler.resume()
            for job, ticks in due:
                self._submit(job, ticks)
            self._owes = False
            await self._ask(term, asyncio.gather(*(self._ledger.enter(remark) for remark in remarks)))
            await self._note_settled(term, jobs, now)
            await self._tidy(term)
        except StoreError:
            logger.debug("The term ended while it was being taken up")

    def _jobs(self) -> dict[str, Any]:
        """The jobs this worker can run, by key. Those of another version of the application are left alone."""
        jobs = [job for job in self._scheduler.get_jobs() if job.func is not stock.unknown_function]
        return {self._gate.names.of(job): job for job in jobs}

    async def _meet(self, term: Term, jobs: dict[str, Any]) -> dict[str, JobState]:
        notes = [self._settling.note(key, job) for key, job in jobs.items()]
        states: dict[str, JobState] = {}
        for chunk in _chunks(notes):
            states |= await self._ask(term, self._backend.meet(term, chunk))
        for key, state in states.items():
            if state.removed:
                self._paused.pop(key, None)  # if it comes back, it is news
            else:
                self._paused[key] = state.paused
        self._triggers |= {key: job.trigger for key, job in jobs.items()}
        return states

    async def _known(
        self, term: Term, jobs: dict[str, Any], states: dict[str, JobState], now: datetime
    ) -> dict[str, set[datetime]]:
        """The ticks that have a row, at least as far back as a tick might be run."""
        since = [
            (key, min(states[key].since, now - timedelta(seconds=self._gate.latest_start(job))))
            for key, job in jobs.items()
        ]
        known: dict[str, set[datetime]] = {}
        for chunk in _chunks(since, 50):  # each may have thousands of ticks
            known |= await self._ask(term, self._backend.ticks(term, dict(chunk)))
        return known

    def _submit(self, job: Any, due: list[Due]) -> bool:
        """Whether there is an executor that takes it, given room."""
        if not due:
            return True
        try:
            if not self._executor(job.executor).submit(job, due):
                return False
        except MaxInstancesReachedError:
            if due[0].cause == "catch_up":
                reason = f"max_instances={job.max_instances} runs of it were still alive"
                self._gate.remark(job, [each.tick for each in due], reason)
            return True
        except Exception:
            logger.exception("Job %s could not be submitted to its executor", job.id)
            return False
        ticks = [each.tick for each in due]
        self._scheduler._dispatch_event(JobSubmissionEvent(EVENT_JOB_SUBMITTED, job.id, job._jobstore_alias, ticks))
        return True

    # -- leading -----------------------------------------------------------------------------------------------------

    async def _look_after(self, term: Term) -> None:
        try:
            await self._tell(term)
            if boot_clock() - self._tidied_at >= self._lease:
                await self._tidy(term)
        except StoreError:
            logger.debug("The term ended while it was being looked after")
        except Exception:
            # A job store that is away, say: the scheduler itself goes on trying, and so do we.
            logger.exception("The jobs could not be looked after")

    async def _tell(self, term: Term) -> None:
        """Tell the fleet of jobs that were added, rescheduled, paused, resumed or removed here since."""
        jobs = self._jobs()
        if added := {key: job for key, job in jobs.items() if self._is_news(key, job)}:
            states = await self._meet(term, added)
            await self._note(term, [JobChange(key, removed=False) for key in added if states[key].removed])
            self._paused |= {key: states[key].paused for key in added}
        await self._note_changes(term, jobs)
        if self._racing:
            await self._heed(term, jobs)

    def _is_news(self, key: str, job: Any) -> bool:
        """Whether the fleet has not met the job as it is: it was added, or its schedule was changed."""
        if key not in self._paused:
            return True
        met = self._triggers[key]
        return job.trigger is not met and fingerprint(job.trigger) != fingerprint(met)

    async def _note_changes(self, term: Term, jobs: dict[str, Any]) -> None:
        """Tell of what the application did to jobs that the fleet knows, and nobody has been told."""
        removed = {key for key in self._removed if key not in jobs}
        paused = {key: job.next_run_time is None for key, job in jobs.items()}
        changed = {key: now for key, now in paused.items() if now != self._paused.get(key, now)}
        await self._note(
            term,
            [JobChange(key, removed=True) for key in removed]
            + [JobChange(key, paused=now) for key, now in changed.items()],
        )
        self._removed -= {*removed, *jobs}
        self._paused |= changed

    async def _note(self, term: Term, changes: list[JobChange]) -> None:
        for chunk in _chunks(changes):
            await self._ask(term, self._backend.note(term, chunk))

    async def _note_settled(self, term: Term, jobs: dict[str, Any], now: datetime) -> None:
        """All earlier ticks have been accounted for, so that the next leader need not look at them; but for those that still
        wait, and have no row before they are claimed."""
        self._settled_at = boot_clock()
        since = {key: now - timedelta(seconds=self._gate.latest_start(job)) for key, job in jobs.items()}
        for key, tick, _ in self._gate.without_verdict():
            if key in since:
                since[key] = min(tick - INSTANT, since[key])
        await self._note(term, [JobChange(key, since=moment) for key, moment in since.items()])

    async def _heed(self, term: Term, jobs: dict[str, Any]) -> None:
        """In a race, do to the jobs here what was done to them in other workers: paused, resumed, removed."""
        for chunk in _chunks(jobs):
            for key, state in (await self._ask(term, self._backend.recall(term, chunk))).items():
                job, before = jobs[key], self._paused.get(key)
                if before is None:
                    continue  # removed here meanwhile
                if state.removed:
                    self._paused.pop(key)
                    stock.remove(self._scheduler, job.id, job._jobstore_alias)
                elif state.paused != before:
                    self._paused[key] = state.paused
                    change = self._scheduler.pause_job if state.paused else self._scheduler.resume_job
                    change(job.id, job._jobstore_alias)

    async def _tidy(self, term: Term) -> None:
        """Give up the runs of workers that are gone, repeat those whose policy says so, forget what is old."""
        self._tidied_at = boot_clock()
        await self._sweep(term)
        if self._repeats is None or self._repeats[0] is not term or self._repeats[1].done():
            self._repeats = term, self._start(self._repeat(term))
        if boot_clock() - self._settled_at >= _SETTLE_EVERY:
            # Twice as late as any tick may start: one that was refused on its way has a row by then.
            jobs = self._jobs()
            late = max((self._gate.latest_start(job) for job in jobs.values()), default=0.0)
            await self._note_settled(term, jobs, self._backend.now() - timedelta(seconds=late))
        await self._ask(term, self._backend.prune(term, self._keep_runs))

    async def _repeat(self, term: Term) -> None:
        try:
            await self._repeating.run(term, partial(self._ask, term))
        except StoreError:
            logger.debug("The term ended while runs were being repeated")
        except Exception:
            logger.exception("Runs that were cut short could not be repeated")  # a job store that is away, say

    async def _sweep(self, term: Term) -> None:
        if not self._is_steady():
            return  # after the store was away nobody has been seen for a while, and it need not mean anything
        if given_up := await self._ask(term, give_up_the_gone(self._backend, term)):
            logger.warning("%d run(s) of workers that are gone were given up", given_up)


def _chunks(items: Iterable[Any], size: int = 200) -> Iterable[list[Any]]:
    iterator = iter(items)
    return iter(lambda: list(islice(iterator, size)), [])
