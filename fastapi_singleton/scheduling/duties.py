"""What a leader does with the user's scheduler.

Elected: start it (paused), meet the jobs, see which ticks have no row, then resume it and run those. Leading: show the jobs,
give up runs of workers that are gone, repeat what is to be repeated, forget what is old. Lost: pause at once; what runs goes
on and is written down when the store takes it. Stopping: no new claim, wait for what runs, stop the scheduler.
"""

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from apscheduler.events import EVENT_JOB_MISSED, EVENT_JOB_REMOVED, JobExecutionEvent

from ..backends import Backend
from ..catching_up import fingerprint
from ..election import Duties
from ..errors import ConfigurationError
from ..jobs import policy_of, running
from ..ledger import Ledger
from ..records import Ending, Entry, JobView, Run, Term, Verdict, run_id
from ..timing import boot_clock
from . import stock
from .guard import Due, Guard, NotRun
from .succession import Succession

logger = logging.getLogger("fastapi_singleton")

_DEFAULT_GRACE = 1  # APScheduler's default misfire_grace_time: nobody chose it
_LONGEST_ERROR = 2000
_LAST_WORDS = 0.5


class SchedulerDuties(Duties):
    """Runs the user's scheduler while this worker leads: `open` at the lifespan's start, `close` at its end."""

    def __init__(self, scheduler: Any, catch_up: float, keep_runs: float) -> None:
        stock.check_scheduler(scheduler)
        self.scheduler = scheduler
        self.keep_runs = keep_runs
        self._catch_up = catch_up
        self._definitions: list[tuple[stock.Pending, dict[str, Any]]] = []
        self._guards: dict[str, Guard] = {}
        self._under_way: set[object] = set()
        self._lock = threading.Lock()
        self._said_idle_job = False
        self._closing = False
        self._accepting = False
        self._succession: Succession | None = None
        self._keys: dict[str, str] = {}
        self.problems: list[str] = []

    def open(
        self, name: str, lease: float, trusted: Callable[[], Term | None], backend: Backend, ledger: Ledger
    ) -> None:
        """Put the guard in place. `trusted` tells, from any thread, whether this worker leads."""
        scheduler = self.scheduler
        stock.check_scheduler(scheduler)
        self._name, self._trusted, self._ledger = name, trusted, ledger
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._closing = False
        self._define()
        explicit = {
            job.id: state["next_run_time"] for (job, _, _), state in self._definitions if state.get("next_run_time")
        }
        self._succession = Succession(self, backend, ledger, lease, explicit)
        # Instance attributes shadow the class's methods; `close` takes them away again.
        scheduler._lookup_executor = self.executor
        scheduler._dispatch_event = self.dispatch
        stock.process_jobs_by(scheduler, backend.now, lease)

    def _define(self) -> None:
        """Keep the jobs as the application defines them; the scheduler forgets them when it is shut down."""
        pending = self.scheduler._pending_jobs
        restored = {id(job) for (job, _, _), _ in self._definitions}
        added = {(alias, stock.job_key(job)) for job, alias, _ in pending if id(job) not in restored}
        # An application that adds its jobs inside its lifespan adds them anew beside those put back by `close`.
        pending[:] = [
            (job, alias, replace)
            for job, alias, replace in pending
            if id(job) not in restored or (alias, stock.job_key(job)) not in added
        ]
        self._definitions = [(entry, stock.state_of(entry[0])) for entry in pending]
        self._keys, self.problems = {}, []
        for entry in list(pending):
            job, alias, _ = entry
            self._check_policy(job)
            key = stock.job_key(job, shared=stock.is_shared(self.scheduler, alias))
            if key in self._keys.values():
                pending.remove(entry)
                self._refuse(key)
            self._keys.setdefault(job.id, key)

    def _check_policy(self, job: Any) -> None:
        catch_up = policy_of(job.func).catch_up
        if catch_up is not None and self.keep_runs < 2 * catch_up:
            raise ConfigurationError(
                f"The job {job.name} has catch_up={catch_up!r}, but runs are kept for only {self.keep_runs:g} s.",
                hint="set keep_runs to at least twice the longest catch_up.",
            )

    def _refuse(self, key: str) -> None:
        problem = f"Two jobs are called {key!r}; the second is not run. Hint: give it a name of its own with id=."
        logger.error("%s", problem)
        self.problems.append(problem)

    def key(self, job: Any) -> str:
        """The job's name across workers. Of several added at run time from one function, the first has the function's
        name and the others, which no other worker has, their own ids."""
        known = self._keys.get(job.id)
        if known is None:
            key = stock.job_key(job, shared=stock.is_shared(self.scheduler, job._jobstore_alias))
            known = self._keys[job.id] = job.id if key in self._keys.values() else key
        return known

    @property
    def keys(self) -> set[str]:
        """The jobs this worker's code defines."""
        return {self._keys[job.id] for (job, _, _), _ in self._definitions if job.id in self._keys}

    @property
    def version(self) -> str:
        """A digest of the jobs this worker's code defines, and of their schedules."""
        lines = sorted(
            f"{stock.job_key(job, shared=stock.is_shared(self.scheduler, alias))} {fingerprint(job.trigger)}"
            for job, alias, _ in self.scheduler._pending_jobs
        )
        return hashlib.blake2b("\n".join(lines).encode("utf-8", "replace"), digest_size=4).hexdigest()

    async def take_up(self, term: Term) -> None:
        assert self._succession is not None
        afresh = not self.scheduler.running
        if afresh:
            stock.start_paused(self.scheduler)
        self._accepting = True
        self._succession.begin(term, afresh=afresh)

    def lay_down(self) -> None:
        self._accepting = False
        if self._succession is not None:
            self._succession.end()
        if self.scheduler.running:
            self.scheduler.pause()

    def renewed(self) -> None:
        assert self._succession is not None
        self._succession.go_on()
        # Another process may have put a due job into a shared store, and nothing else would wake this scheduler.
        if self.scheduler.running:
            self.scheduler.wakeup()

    def standing_by(self) -> None:
        # Before its first term a scheduler is not started: a job added now waits in this worker's memory alone.
        if len(self.scheduler._pending_jobs) > len(self._definitions) and not self._said_idle_job:
            self._said_idle_job = True
            logger.warning(
                "A job was added on a worker that does not lead; it will run only if this worker is elected. "
                "Add jobs before the lifespan starts, in every worker, or use a persistent job store."
            )

    def jobs(self) -> Sequence[JobView]:
        return [
            JobView(
                id=self.key(job),
                trigger=str(job.trigger),
                next_run_at=job.next_run_time.astimezone(UTC) if getattr(job, "next_run_time", None) else None,
                paused=getattr(job, "next_run_time", UTC) is None,
            )
            for job in self.scheduler.get_jobs()
        ]

    async def drain(self, timeout: float) -> int:
        """Wait until nothing is under way any more, coroutines and threads alike; how many are left after `timeout`."""
        deadline = self._loop.time() + timeout
        while self._under_way and self._loop.time() < deadline:
            await asyncio.sleep(min(0.02, max(0.0, deadline - self._loop.time())))
        return len(self._under_way)

    async def close(self) -> None:
        """Stop the scheduler and leave it as it was found, so that the application may be started again."""
        scheduler = self.scheduler
        self._closing = True
        try:
            if scheduler.running:
                await stock.shut_down(scheduler)
                await self.drain(_LAST_WORDS)  # cancelled coroutine jobs see to it here that they are written down
        finally:
            for name in ("_lookup_executor", "_dispatch_event"):
                vars(scheduler).pop(name, None)
            stock.process_jobs_as_usual(scheduler)
        for (job, _, _), state in self._definitions:
            stock.restore(job, state)
        scheduler._pending_jobs[:] = [entry for entry, _ in self._definitions]

    # -- the scheduler's side of the guard ---------------------------------------------------------------------------

    def executor(self, alias: str) -> Guard:
        executor = self.scheduler._executors.get(alias)
        guard = self._guards.get(alias)
        if guard is None or guard.inner is not executor:
            guard = self._guards[alias] = Guard(executor, alias, self)
        return guard

    def dispatch(self, event: Any) -> None:
        """Let events through, but for those of calls that were not made."""
        match getattr(event, "retval", None):
            case NotRun.TOO_LATE:
                event = JobExecutionEvent(EVENT_JOB_MISSED, event.job_id, event.jobstore, event.scheduled_run_time)
            case NotRun():
                return
        if event.code == EVENT_JOB_REMOVED and self._succession is not None:
            self._succession.removed(self._keys.pop(event.job_id, event.job_id))
        type(self.scheduler)._dispatch_event(self.scheduler, event)

    # -- the gate ----------------------------------------------------------------------------------------------------

    @contextmanager
    def submitted(self, calls: int) -> Iterator[Callable[[], None]]:
        mark, left = object(), [calls]

        def done() -> None:
            with self._lock:
                left[0] -= 1
                if left[0] <= 0:
                    self._under_way.discard(mark)

        with self._lock:
            self._under_way.add(mark)
        try:
            yield done
        except BaseException:
            with self._lock:
                self._under_way.discard(mark)
            raise

    async def admit(self, key: str, job: Any, due: Due) -> Entry | NotRun:
        term = self._trusted()
        if term is None or not self._accepting:
            return _not_run(job, due, NotRun.REFUSED)
        latest = due.latest or due.tick + timedelta(seconds=self.latest_start(job))
        entry = Entry(key, due.tick, due.attempt, due.cause, term.token, latest=latest)
        verdict = await self._ledger.enter(entry)
        while verdict is Verdict.EARLY and self._trusted() == term and self._accepting:
            # This host's clock, or the trigger, runs ahead of the store.
            await asyncio.sleep(0.05)
            verdict = await self._ledger.enter(entry)
        if verdict is Verdict.YOURS and self._trusted() is None:
            # So much time has passed that the run may have been given up for dead meanwhile: ask once more.
            verdict = await self._ledger.enter(entry)
        if verdict not in (Verdict.LOST, Verdict.EARLY) and stock.is_shared_date(
            self.scheduler, job, job._jobstore_alias
        ):
            stock.remove(self.scheduler, job.id, job._jobstore_alias)  # it is in the ledger now
        match verdict:
            case Verdict.YOURS:
                return entry
            case Verdict.WRITTEN:
                return _not_run(job, due, NotRun.TOO_LATE)
            case Verdict.TAKEN | Verdict.PRUNED:
                return _not_run(job, due, NotRun.TAKEN)
            case _:
                return _not_run(job, due, NotRun.REFUSED)

    def admit_from_thread(self, key: str, job: Any, due: Due) -> Entry | NotRun:
        if threading.get_ident() == self._loop_thread:
            raise ConfigurationError(
                f"The executor {job.executor!r} runs jobs on the event loop's own thread, where none can wait for its claim.",
                hint="use the default executor, a thread pool or a process pool.",
            )
        try:
            return asyncio.run_coroutine_threadsafe(self.admit(key, job, due), self._loop).result()
        except (asyncio.CancelledError, RuntimeError):  # the loop is closing, or closed
            return NotRun.REFUSED

    @contextmanager
    def recorded(self, entry: Entry) -> Iterator[Run]:
        run = Run(
            run_id(self._name, entry.job, entry.tick, entry.attempt),
            entry.job, entry.tick, entry.attempt, entry.token, entry.nonce,
        )  # fmt: skip
        began, ending = boot_clock(), Ending(entry, "succeeded", 0.0)
        try:
            with running(run):
                yield run
        except BaseException as error:
            if self._closing and isinstance(error, asyncio.CancelledError):
                ending = Ending(entry, "abandoned", 0.0, "cut short: its worker stopped before it ended")
            else:
                ending = Ending(entry, "failed", 0.0, _describe(error))
            raise
        finally:
            self._end(Ending(entry, ending.outcome, boot_clock() - began, ending.error))

    def _end(self, ending: Ending) -> None:
        try:
            self._loop.call_soon_threadsafe(self._ledger.end, ending)
        except RuntimeError:
            logger.warning("A run of %s ended after its worker, and will be shown as abandoned", ending.entry.job)

    def remark(self, job: Any, ticks: Sequence[datetime], reason: str) -> None:
        term = self._trusted()
        if term is None or not ticks:
            return
        key = self.key(job)
        entries = [Entry(key, t.astimezone(UTC), token=term.token, outcome="skipped", error=reason) for t in ticks]
        self._loop.call_soon_threadsafe(self._ledger.remark, entries)

    def latest_start(self, job: Any) -> float:
        """How late a tick may start: `catch_up`, narrowed by a misfire_grace_time that the user has set."""
        catch_up = policy_of(job.func).catch_up
        catch_up = self._catch_up if catch_up is None else catch_up
        grace = job.misfire_grace_time
        return catch_up if grace in (None, _DEFAULT_GRACE) else min(catch_up, grace)


def _not_run(job: Any, due: Due, why: NotRun) -> NotRun:
    level = logging.DEBUG if why is NotRun.TAKEN else logging.WARNING
    logger.log(level, "Job %s due at %s was not run: %s", job.id, due.tick, why.value, extra={"job": job.id})
    return why


def _describe(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text[:_LONGEST_ERROR]
