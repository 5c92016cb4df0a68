"""One job at the beginning of a term: which of its ticks are to run, which are to be accounted for, which comes next.

In a race every worker does this, each for itself, and the claim decides. So they must agree on the ticks: an interval counts
from 1970 on, and a tick that a worker's own clock has made stands for the moment the fleet first met the job.
"""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from .. import catching_up
from ..catching_up import EPOCH
from ..records import Entry, JobNote, JobState, Term
from . import stock
from .gate import Due, Gate

logger = logging.getLogger("fastapi_singleton")


class Settling:
    """How one worker settles its jobs, by the store's clock."""

    def __init__(
        self,
        gate: Gate,
        scheduler: Any,
        now: Callable[[], datetime],
        lease: float,
        explicit: dict[str, datetime],
        complain: Callable[[str], None],
        *,
        racing: bool,
    ) -> None:
        self._gate = gate
        self._scheduler = scheduler
        self._now = now
        self._lease = lease
        self._explicit = explicit  # ticks the application asked for beside the trigger's, by job id
        self._complain = complain
        self._racing = racing

    def note(self, key: str, job: Any) -> JobNote:
        """The job as this worker's code defines it."""
        phase = catching_up.anchor(job.trigger)
        if self._racing and phase is not None:
            phase = EPOCH
        return JobNote(key, catching_up.fingerprint(job.trigger), phase, job.next_run_time is None)

    def settle(
        self, term: Term, job: Any, state: JobState, known: set[datetime], now: datetime, started_at: datetime | None
    ) -> tuple[list[Due], list[Entry]]:
        """Bring one job up to date; what is to run of it, and what is to be written down. `known` are the ticks that have
        a row; `started_at` tells when the scheduler was started for this term, and is None if it was resumed."""
        if state.removed:
            logger.info("Job %s was removed, and stays so until its schedule changes or it is added again", job.id)
            stock.remove(self._scheduler, job.id, job._jobstore_alias)
            return [], []
        trigger = catching_up.anchored(job.trigger, EPOCH if self._racing else state.anchor)
        if state.paused:
            if trigger is not job.trigger:  # for when it is resumed
                self._scheduler.modify_job(job.id, job._jobstore_alias, trigger=trigger)
            if job.next_run_time is not None:
                self._scheduler.pause_job(job.id, job._jobstore_alias)
            return [], []
        afresh = started_at is not None
        if afresh and stock.is_date(job) and self._is_private(job, stock.tick_of(job, now), now):
            stock.remove(self._scheduler, job.id, job._jobstore_alias)
            return [], []
        late = self._gate.latest_start(job)
        if catching_up.has_jitter(trigger) or (afresh and self._is_date_of_this_start(job)):
            plan = catching_up.Plan()  # its ticks are others each time it is asked, or in each worker
        else:
            plan = catching_up.plan(trigger, state.since, now, known, latest_start=late, coalesce=job.coalesce)
        due = [Due(tick, cause="catch_up") for tick in plan.run]
        accounted = {*known, *plan.run, *plan.coalesced, *plan.missed}
        extra = self._off_schedule(job, state, accounted, now, late, started_at)
        if extra is not None and extra <= now:
            due.append(Due(extra, cause="schedule" if afresh else "catch_up"))
        self._move_on(job, trigger, self._upcoming(job, trigger, extra, now, afresh))
        return due, self._remarks(term, job, plan, late)

    def align(self, job: Any) -> None:
        """In a race, give an interval that was added just now the phase it has in every worker."""
        trigger = catching_up.anchored(job.trigger, EPOCH) if self._racing else job.trigger
        if trigger is not job.trigger:
            changes: dict[str, Any] = {"trigger": trigger}
            # A first run that the application asked for itself is kept, and a paused job stays so.
            if job.next_run_time is not None and job.next_run_time == getattr(
                job.trigger, "start_date", job.next_run_time
            ):
                changes["next_run_time"] = catching_up.next_tick(trigger, self._now())
            self._scheduler.modify_job(job.id, job._jobstore_alias, **changes)

    def _off_schedule(
        self,
        job: Any,
        state: JobState,
        accounted: set[datetime],
        now: datetime,
        late: float,
        started_at: datetime | None,
    ) -> datetime | None:
        """A tick that the trigger does not give, if it is to run: `next_run_time=…`, `add_job(f)`, a date before the
        first meeting. It is a different one in each worker, so it counts only if the job has not run lately anyway;
        and an old one is shown as missed only by the first to meet the job."""
        tick = self._explicit.get(job.id) if started_at is not None else None
        if tick is None:
            if job.next_run_time is None:
                return None
            tick = stock.tick_of(job, job.next_run_time)
            if tick > now or tick in accounted:
                return None
            if started_at is not None and tick <= started_at and not stock.is_date(job):
                return None  # worked out by a host whose clock is behind the store's
        if self._is_private(job, tick, now):
            return None
        if self._racing and catching_up.is_implicit(tick):
            tick = state.since
        oldest = now - timedelta(seconds=late)
        if any(other > oldest for other in accounted) or (tick < oldest and not state.new):
            return None
        return tick

    def _is_date_of_this_start(self, job: Any) -> bool:
        """`add_job(f)`: a date that is simply when this worker started."""
        alias = job._jobstore_alias
        return (
            stock.is_date(job)
            and catching_up.is_implicit(job.trigger.run_date)
            and not stock.is_shared(self._scheduler, alias)
        )

    def _is_private(self, job: Any, tick: datetime, now: datetime) -> bool:
        """Whether, in a race, a tick yet to come was worked out from this worker's clock: the others have another."""
        if not (self._racing and tick > now and catching_up.is_implicit(tick)):
            return False
        self._complain(
            f"A run of {self._gate.names.of(job)} at {tick} is not made: it seems to be worked out from this worker's "
            "clock, and mode='race' needs one that is the same in every worker. Hint: give it a time in whole seconds."
        )
        return True

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
            stock.exhausted(self._scheduler, job.id, job._jobstore_alias, self._now(), self._lease)
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
            Entry(term.name, key, tick, cause="catch_up", token=term.fence, outcome="missed", error=reason)
            for tick in plan.missed
        ]
        if plan.unlisted_until is not None and remarks:
            last = f"{reason}; so were all later ones until {plan.unlisted_until:%Y-%m-%d %H:%M:%S} UTC"
            remarks[-1] = Entry(
                term.name, key, plan.missed[-1], cause="catch_up", token=term.fence, outcome="missed", error=last
            )
        for tick in plan.coalesced:
            into = f"coalesced into {plan.run[-1]}"
            remarks.append(
                Entry(term.name, key, tick, cause="catch_up", token=term.fence, outcome="skipped", error=into)
            )
        if remarks or plan.run:
            logger.info(
                "Job %s: %d tick(s) without a run found; %d run now, %d coalesced, %d missed",
                key, len(remarks) + len(plan.run), len(plan.run), len(plan.coalesced), len(plan.missed),
                extra={"job": key},
            )  # fmt: skip
        return remarks
