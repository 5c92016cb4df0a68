"""From leader to leader: what a new one owes for the time before it, and what it looks after while it leads.

Where the fleet's memory and this worker's code disagree about a job, memory wins: a paused job stays paused, a removed one
removed, an interval keeps the phase that the first leader gave it. A changed schedule starts afresh.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from apscheduler.events import EVENT_JOB_SUBMITTED, JobSubmissionEvent
from apscheduler.executors.base import MaxInstancesReachedError

from .. import catching_up
from ..backends import Backend
from ..errors import StoreError
from ..jobs import policy_of
from ..ledger import Ledger
from ..records import Entry, JobChange, JobNote, JobState, Term
from ..timing import boot_clock
from . import stock
from .gate import Due, Gate
from .guard import Guard

logger = logging.getLogger("fastapi_singleton")

# A job whose every attempt takes its worker down must not go on for ever.
MOST_ATTEMPTS = 5
_CHUNK = 200


class Succession:
    """One worker's terms, one after the other. Used on the event loop."""

    def __init__(
        self, gate: Gate, executor: Callable[[str], Guard], scheduler: Any, backend: Backend, ledger: Ledger,
        lease: float, keep_runs: float, explicit: dict[str, datetime],
    ) -> None:  # fmt: skip
        self._gate = gate
        self._executor = executor
        self._scheduler = scheduler
        self._backend = backend
        self._ledger = ledger
        self._lease = lease
        self._keep_runs = keep_runs
        self._explicit = explicit  # ticks the application asked for beside the trigger's, by job id
        self._paused: dict[str, bool] = {}
        self._removed: set[str] = set()
        self._repeating: set[tuple[str, datetime, int]] = set()
        self._tidied_at = 0.0
        self._term: Term | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, term: Term, at: datetime, *, afresh: bool) -> None:
        """A term begins, by the store's clock at that time; `afresh`: the scheduler was started for it, not resumed."""
        self._term = term
        self._began_at = at
        self._paused.clear()
        self._repeating.clear()
        self._removed.clear()
        self._tidied_at = 0.0
        self._tasks = [asyncio.create_task(self._take_over(term, afresh))]

    def end(self) -> None:
        """The term is over: whatever is still being prepared under it stops."""
        self._term = None
        for task in self._tasks:
            task.cancel()

    def go_on(self) -> None:
        """Called at each renewal. Raises what has gone wrong unforeseen, so that this worker resigns."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error
        if self._term is not None and all(task.done() for task in self._tasks):
            self._tasks = [asyncio.create_task(self._look_after(self._term))]

    def removed(self, key: str) -> None:
        """The application removed a job; the fleet is told at the next renewal."""
        self._removed.add(key)
        self._paused.pop(key, None)

    # -- taking over -------------------------------------------------------------------------------------------------

    async def _take_over(self, term: Term, afresh: bool) -> None:
        try:
            jobs = self._jobs()
            states = await self._meet(term, jobs)
            now = self._backend.now()
            known = await self._known(term, jobs, states, now)
            due: list[tuple[Any, list[Due]]] = []
            remarks: list[Entry] = []
            for key, job in jobs.items():
                await asyncio.sleep(0)  # renewals and requests go on between any two jobs
                try:
                    ticks, reasons = self._settle(term, job, states[key], known[key], now, afresh)
                except Exception:
                    logger.exception("Job %s could not be caught up on", key)
                    continue
                due.append((job, ticks))
                remarks += reasons
            self._scheduler.resume()
            for job, ticks in due:
                self._submit(job, ticks)
            await asyncio.gather(*(self._ledger.enter(remark) for remark in remarks))
            settled = [
                JobChange(key, since=now - timedelta(seconds=self._gate.latest_start(job))) for key, job in jobs.items()
            ]
            for chunk in _chunks(settled):
                await self._backend.note(term, chunk)
            await self._tidy(term)
        except StoreError:
            logger.debug("The term ended while it was being taken up")

    def _jobs(self) -> dict[str, Any]:
        """The jobs this worker can run, by key. Those of another version of the application are left alone."""
        jobs = [job for job in self._scheduler.get_jobs() if job.func is not stock.unknown_function]
        return {self._gate.names.of(job): job for job in jobs}

    async def _meet(self, term: Term, jobs: dict[str, Any]) -> dict[str, JobState]:
        notes = [
            JobNote(
                key, catching_up.fingerprint(job.trigger), catching_up.anchor(job.trigger), job.next_run_time is None
            )
            for key, job in jobs.items()
        ]
        states: dict[str, JobState] = {}
        for chunk in _chunks(notes):
            states |= await self._backend.meet(term, chunk)
        self._paused = {key: state.paused for key, state in states.items() if not state.removed}
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
        for chunk in _chunks(since):
            known |= await self._backend.ticks(term, dict(chunk))
        return known

    def _settle(
        self, term: Term, job: Any, state: JobState, known: set[datetime], now: datetime, afresh: bool
    ) -> tuple[list[Due], list[Entry]]:
        """Bring one job up to date; what is to run of it, and what is to be written down."""
        if state.removed:
            logger.info("Job %s was removed, and stays so until its schedule changes or it is added again", job.id)
            stock.remove(self._scheduler, job.id, job._jobstore_alias)
            return [], []
        if state.paused:
            if job.next_run_time is not None:
                self._scheduler.pause_job(job.id, job._jobstore_alias)
            return [], []
        trigger = catching_up.anchored(job.trigger, state.anchor)
        late = self._gate.latest_start(job)
        if catching_up.has_jitter(trigger):
            plan = catching_up.Plan()  # its ticks are drawn anew each time it is asked
        else:
            plan = catching_up.plan(trigger, state.since, now, known, latest_start=late, coalesce=job.coalesce)
        due = [Due(tick, cause="catch_up") for tick in plan.run]
        accounted = {*known, *plan.run, *plan.coalesced, *plan.missed}
        extra = self._off_schedule(job, state, accounted, now, late, afresh)
        if extra is not None and extra <= now:
            due.append(Due(extra, cause="schedule" if afresh else "catch_up"))
        self._move_on(job, trigger, self._upcoming(job, trigger, extra, now, afresh))
        return due, self._remarks(term, job, plan, late)

    def _off_schedule(
        self, job: Any, state: JobState, accounted: set[datetime], now: datetime, late: float, afresh: bool
    ) -> datetime | None:
        """A tick that the trigger does not give, if it is to run: `next_run_time=…`, `add_job(f)`, a date before the
        first meeting. It is a different one in each worker, so it counts only if the job has not run lately anyway;
        and an old one is shown as missed only by the first to meet the job."""
        tick = self._explicit.get(job.id) if afresh else None
        if tick is None:
            if job.next_run_time is None:
                return None
            tick = stock.tick_of(job, job.next_run_time)
            if tick > now or tick in accounted:
                return None
            if afresh and tick <= self._began_at and not stock.is_date(job):
                return None  # worked out by a host whose clock is behind the store's
        oldest = now - timedelta(seconds=late)
        if any(other > oldest for other in accounted) or (tick < oldest and not state.new):
            return None
        return tick

    def _upcoming(self, job: Any, trigger: Any, extra: datetime | None, now: datetime, afresh: bool) -> datetime | None:
        """The next tick for the scheduler. One that it has is kept, unless it was worked out just now by the host's clock
        and an anchor of its own."""
        if extra is not None and extra > now:
            return extra
        has: datetime | None = job.next_run_time
        kept = not afresh or stock.is_shared(self._scheduler, job._jobstore_alias)
        if has is not None and has > now and kept and trigger is job.trigger:
            return has
        return catching_up.next_tick(trigger, now)

    def _move_on(self, job: Any, trigger: Any, upcoming: datetime | None) -> None:
        if upcoming is None:
            stock.exhausted(self._scheduler, job.id, job._jobstore_alias, self._backend.now(), self._lease)
            return
        changes: dict[str, Any] = {}
        if trigger is not job.trigger:
            changes["trigger"] = trigger
        if upcoming != job.next_run_time:
            changes["next_run_time"] = upcoming
        if changes:
            self._scheduler.modify_job(job.id, job._jobstore_alias, **changes)

    def _remarks(self, term: Term, job: Any, plan: catching_up.Plan, late: float) -> list[Entry]:
        key = self._gate.names.of(job)
        reason = f"nobody ran it in time, and it may start at most {late:g} s late"
        remarks = [
            Entry(term.name, key, tick, cause="catch_up", token=term.token, outcome="missed", error=reason)
            for tick in plan.missed
        ]
        if plan.unlisted_until is not None and remarks:
            last = f"{reason}; so were all later ones until {plan.unlisted_until:%Y-%m-%d %H:%M:%S} UTC"
            remarks[-1] = Entry(
                term.name, key, plan.missed[-1], cause="catch_up", token=term.token, outcome="missed", error=last
            )
        for tick in plan.coalesced:
            into = f"coalesced into {plan.run[-1]}"
            remarks.append(
                Entry(term.name, key, tick, cause="catch_up", token=term.token, outcome="skipped", error=into)
            )
        if remarks or plan.run:
            logger.info(
                "Job %s: %d tick(s) without a run found; %d run now, %d coalesced, %d missed",
                key, len(remarks) + len(plan.run), len(plan.run), len(plan.coalesced), len(plan.missed),
                extra={"job": key},
            )  # fmt: skip
        return remarks

    def _submit(self, job: Any, due: list[Due]) -> bool:
        if not due:
            return True
        try:
            self._executor(job.executor).submit(job, due)
        except MaxInstancesReachedError:
            if due[0].cause == "catch_up":
                reason = f"max_instances={job.max_instances} runs of it were still alive"
                self._gate.remark(job, [each.tick for each in due], reason)
            return False
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
        """Tell the fleet of jobs that were added, paused, resumed or removed here since."""
        jobs = self._jobs()
        changes = [JobChange(key, removed=True) for key in self._removed if key not in jobs]
        self._removed.clear()
        added = {key: job for key, job in jobs.items() if key not in self._paused}
        if added:
            before = dict(self._paused)
            states = await self._meet(term, added)
            self._paused = before | {key: states[key].paused for key in added}
            changes += [JobChange(key, removed=False) for key in added if states[key].removed]
        for key, job in jobs.items():
            paused = job.next_run_time is None
            if paused != self._paused[key]:
                changes.append(JobChange(key, paused=paused))
                self._paused[key] = paused
        for chunk in _chunks(changes):
            await self._backend.note(term, chunk)

    async def _tidy(self, term: Term) -> None:
        """Give up the runs of workers that are gone, repeat those whose policy says so, forget what is old."""
        self._tidied_at = boot_clock()
        if given_up := await self._backend.sweep(term):
            logger.warning("%d run(s) of workers that are gone were given up", given_up)
        await self._repeat(term)
        await self._backend.prune(term, self._keep_runs)

    async def _repeat(self, term: Term) -> None:
        jobs = {key: job for key, job in self._jobs().items() if policy_of(job.func).on_crash == "rerun"}
        if not jobs:
            return
        within = max(self._gate.latest_start(job) for job in jobs.values())
        for cut in await self._backend.cut(term, list(jobs), MOST_ATTEMPTS, within):
            attempt = cut.job, cut.tick, cut.attempt + 1
            if attempt in self._repeating:
                continue
            job = jobs[cut.job]
            latest = cut.found_at + timedelta(seconds=self._gate.latest_start(job))
            if self._submit(job, [Due(cut.tick, cut.attempt + 1, "rerun", latest)]):
                self._repeating.add(attempt)


def _chunks(items: Iterable[Any]) -> Iterable[list[Any]]:
    iterator = iter(items)
    return iter(lambda: list(islice(iterator, _CHUNK)), [])
