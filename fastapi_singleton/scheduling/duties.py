"""What a leader does with the user's scheduler.

Elected: start it (paused), meet the jobs, see which ticks have no row, then resume it and run those. Leading: show the jobs,
give up runs of workers that are gone, repeat what is to be repeated, forget what is old. Lost: pause at once; what runs goes
on and is written down when the store takes it. Stopping: no new claim, wait for what runs, stop the scheduler.
"""

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import UTC
from typing import Any

from apscheduler.events import (
    EVENT_JOB_ADDED,
    EVENT_JOB_MAX_INSTANCES,
    EVENT_JOB_MISSED,
    EVENT_JOB_MODIFIED,
    EVENT_JOB_REMOVED,
    JobExecutionEvent,
    JobSubmissionEvent,
)

from ..backends import Backend
from ..catching_up import fingerprint
from ..election import Duties
from ..errors import ConfigurationError
from ..jobs import policy_of
from ..ledger import Ledger
from ..records import JobView, Term
from ..timing import boot_clock
from . import stock
from .gate import Gate, NotRun
from .guard import Guard
from .looking import Looking
from .names import Names
from .settling import Settling
from .succession import Succession

logger = logging.getLogger("fastapi_singleton")

_LAST_WORDS = 0.5


class SchedulerDuties(Duties):
    """Runs the user's scheduler while this worker leads: `open` at the lifespan's start, `close` at its end."""

    def __init__(self, scheduler: Any, catch_up: float, keep_runs: float, *, racing: bool = False) -> None:
        stock.check_scheduler(scheduler)
        if racing:
            stock.check_for_race(scheduler)
        self.scheduler = scheduler
        self.problems: list[str] = []
        self._catch_up = catch_up
        self._keep_runs = keep_runs
        self._racing = racing
        self._names = Names(scheduler, racing=racing)
        self._definitions: list[tuple[stock.Pending, dict[str, Any]]] = []
        self._dates: dict[str, Any] = {}
        self._guards: dict[str, Guard] = {}
        self._guarding = threading.Lock()
        self._said_idle_job = False
        for job, _, _ in scheduler._pending_jobs:
            self._check_policy(job)

    def open(
        self,
        name: str,
        lease: float,
        trusted: Callable[[], Term | None],
        backend: Backend,
        ledger: Ledger,
        is_steady: Callable[[], bool] = lambda: True,
    ) -> None:
        """Put the guard in place. `trusted` tells, from any thread, whether this worker leads; `is_steady`, whether the
        store has had the time to see the other workers."""
        scheduler = self.scheduler
        stock.check_scheduler(scheduler)
        if self._racing:
            stock.check_for_race(scheduler)
        self._define()
        explicit = {
            job.id: state["next_run_time"] for (job, _, _), state in self._definitions if state.get("next_run_time")
        }
        self._gate = Gate(name, scheduler, self._names, self._catch_up, trusted, ledger)
        self._now = backend.now
        self._guards.clear()
        self._settling = Settling(
            self._gate, scheduler, backend.now, lease, explicit, self._complain, racing=self._racing
        )
        self._succession = Succession(
            self._gate, self._executor, scheduler, backend, ledger, lease, self._keep_runs, self._settling,
            is_steady, self._dates, racing=self._racing,
        )  # fmt: skip
        # Instance attributes shadow the class's methods; `close` takes them away again.
        scheduler._lookup_executor = self._executor
        scheduler._dispatch_event = self._dispatch
        scheduler._process_jobs = Looking(scheduler, backend.now, lease)

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
        self._names, self.problems, self._dates = Names(self.scheduler, racing=self._racing), [], {}
        for entry in list(pending):
            job, alias, _ = entry
            self._check_policy(job)
            name = self._names.define(job, alias)
            if name is None:
                pending.remove(entry)
                self._refuse(stock.job_key(job))
            elif stock.is_date(job) and policy_of(job.func).on_crash == "rerun":
                self._dates[name] = job

    def _check_policy(self, job: Any) -> None:
        catch_up = policy_of(job.func).catch_up
        if catch_up is not None and self._keep_runs < 2 * catch_up:
            raise ConfigurationError(
                f"The job {job.name} has catch_up={catch_up!r}, but runs are kept for only {self._keep_runs:g} s.",
                hint="set keep_runs to at least twice the longest catch_up.",
            )

    def _refuse(self, name: str) -> None:
        self._complain(
            f"Two jobs are called {name!r}; the second is not run. Hint: give it a name of its own with id=."
        )

    def _complain(self, problem: str) -> None:
        if problem not in self.problems:
            logger.error("%s", problem)
            self.problems.append(problem)

    @property
    def names(self) -> set[str]:
        """The jobs this worker's code defines, as the fleet calls them."""
        return self._names.defined

    @property
    def version(self) -> str:
        """A digest of the jobs this worker's code defines, and of their schedules."""
        lines = sorted(f"{stock.job_key(job)} {fingerprint(job.trigger)}" for job, _, _ in self.scheduler._pending_jobs)
        return hashlib.blake2b("\n".join(lines).encode("utf-8", "replace"), digest_size=4).hexdigest()

    async def take_up(self, term: Term) -> None:
        started_at = None if self.scheduler.running else self._now()
        if started_at is not None:
            stock.start_paused(self.scheduler)
        self._gate.accepting = True
        self._succession.begin(term, started_at)

    def lay_down(self) -> None:
        self._gate.accepting = False
        self._succession.end()
        if self.scheduler.running:
            self.scheduler.pause()

    def renewed(self) -> None:
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
                id=self._names.of(job),
                trigger=str(job.trigger),
                next_run_at=job.next_run_time.astimezone(UTC) if getattr(job, "next_run_time", None) else None,
                paused=getattr(job, "next_run_time", UTC) is None,
            )
            for job in self.scheduler.get_jobs()
        ]

    async def drain(self, timeout: float) -> int:
        """Wait until nothing is under way any more, coroutines and threads alike; how many are left after `timeout`."""
        deadline = boot_clock() + timeout
        while self._gate.under_way and boot_clock() < deadline:
            await asyncio.sleep(min(0.02, max(0.0, deadline - boot_clock())))
        return self._gate.under_way

    async def close(self) -> None:
        """Stop the scheduler and leave it as it was found, so that the application may be started again."""
        scheduler = self.scheduler
        self._gate.closing = True
        await self._succession.close(_LAST_WORDS)
        try:
            if scheduler.running:
                await stock.shut_down(scheduler)
                await self.drain(_LAST_WORDS)  # cancelled coroutine jobs see to it here that they are written down
        finally:
            for name in ("_lookup_executor", "_dispatch_event"):
                vars(scheduler).pop(name, None)
            stock.process_jobs_as_usual(scheduler)
            for guard in self._guards.values():
                guard.close()
        for (job, _, _), state in self._definitions:
            stock.restore(job, state)
        scheduler._pending_jobs[:] = [entry for entry, _ in self._definitions]
        for guard in self._guards.values():
            await guard.dismiss_children(_LAST_WORDS)

    def _join_race(self, event: Any) -> None:
        """A job was added or changed while the others run."""
        job = self.scheduler._lookup_job(event.job_id, event.jobstore)[0]
        reason = stock.unfit_for_race(job.trigger)
        if reason is None:
            self._settling.align(job)
        elif job.next_run_time is not None:
            self._complain(f"The job {job.id} is not run: {reason}")
            self.scheduler.pause_job(job.id, event.jobstore)

    def _executor(self, alias: str) -> Guard:
        executor = self.scheduler._executors.get(alias)
        guard = self._guards.get(alias)
        if guard is None or guard.inner is not executor:
            with self._guarding:  # the scheduler may ask from a thread of its own
                guard = self._guards.get(alias)
                if guard is None or guard.inner is not executor:
                    guard = self._guards[alias] = Guard(executor, alias, self._gate)
        return guard

    def _dispatch(self, event: Any) -> None:
        """Let events through, but for those of calls that were not made."""
        match getattr(event, "retval", None):
            case NotRun.TOO_LATE:
                event = JobExecutionEvent(EVENT_JOB_MISSED, event.job_id, event.jobstore, event.scheduled_run_time)
            case NotRun.FULL:
                ticks = [event.scheduled_run_time]
                event = JobSubmissionEvent(EVENT_JOB_MAX_INSTANCES, event.job_id, event.jobstore, ticks)
            case NotRun():
                return
        if event.code == EVENT_JOB_REMOVED:
            if isinstance(event, stock.QuietRemoval):
                self._names.done(event.job_id)
            else:
                self._succession.removed(self._names.removed(event.job_id))
        if event.code & (EVENT_JOB_ADDED | EVENT_JOB_MODIFIED) and self._racing and self._gate.accepting:
            self._join_race(event)
        if event.code & (EVENT_JOB_ADDED | EVENT_JOB_MODIFIED | EVENT_JOB_REMOVED):
            self._gate.on_loop(self._succession.hurry)
        type(self.scheduler)._dispatch_event(self.scheduler, event)
