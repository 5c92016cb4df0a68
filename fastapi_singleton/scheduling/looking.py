"""Looks for due jobs, in place of the scheduler's own `_process_jobs`. As there, but for:

- *Whose clock.* The store's, so that a host whose clock is minutes off fires the same ticks as any other. In UTC: two times of
  one zone are compared by the wall clock, so that in the hour that comes twice jobs would be due an hour early.
- *How many at a time.* A thousand jobs due together neither hold up requests nor wait for each other's claims: some are
  submitted, and the others are still due when the scheduler looks again, at once. What can wait, waits until all are
  submitted: which tick comes next takes as long to find out as the rest.
- *How often a trigger is asked.* Once for each tick. Stock asks for the next one twice, and nothing else costs it more.
- *A trigger or a job store that fails* is asked again later, and does not end the scheduler. What was submitted is then
  submitted again, and refused by its row.
- *A date in a shared store* is not removed before it is in the ledger.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from threading import TIMEOUT_MAX
from typing import Any

from apscheduler.events import EVENT_JOB_MAX_INSTANCES, EVENT_JOB_SUBMITTED, JobSubmissionEvent
from apscheduler.executors.base import MaxInstancesReachedError
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.base import STATE_PAUSED
from apscheduler.triggers.cron import CronTrigger

from . import stock

logger = logging.getLogger("fastapi_singleton")

_CROWD = 50  # so many due at once, in memory, are submitted first and moved on to their next ticks afterwards
_PORTION = 250  # to be submitted before claims and requests have their turn
_STEP = 25  # to be moved on, likewise
_SECOND = timedelta(seconds=1)


class Looking:
    """One scheduler's look-out: called whenever it wakes, it says after how many seconds it wants to be called again."""

    def __init__(self, scheduler: Any, now: Callable[[], datetime], lease: float) -> None:
        self._scheduler = scheduler
        self._now = now
        self._lease = lease
        # Submitted, and not yet moved on: which tick, by store and job.
        self._behind: dict[tuple[str, str], datetime] = {}
        # Failed, and not to be tried again before.
        self._put_off: dict[tuple[str, str], datetime] = {}

    def __call__(self) -> float | None:
        scheduler = self._scheduler
        if scheduler.state == STATE_PAUSED:
            self._behind.clear()  # whoever resumes it sees to it that each job is at its next tick
            return None
        now = self._now()
        self._put_off = {job: until for job, until in self._put_off.items() if until > now}
        upcoming: list[datetime] = []
        events: list[JobSubmissionEvent] = []
        with scheduler._jobstores_lock:
            for alias, store in scheduler._jobstores.items():
                try:
                    upcoming += self._look_into(store, alias, now, events)
                except Exception:
                    logger.exception("The job store %r could not be looked into; it is asked again", alias)
                    upcoming.append(now + timedelta(seconds=scheduler.jobstore_retry_interval))
        for event in events:
            scheduler._dispatch_event(event)
        if scheduler.state == STATE_PAUSED or not upcoming:
            return None
        return float(min(max((min(upcoming) - self._now()).total_seconds(), 0.0), TIMEOUT_MAX))

    def _look_into(self, store: Any, alias: str, now: datetime, events: list[JobSubmissionEvent]) -> list[datetime]:
        """Submit what is due; when to look again, if ever."""
        due = [job for job in store.get_due_jobs(now) if (alias, job.id) not in self._put_off]
        if type(store) is MemoryJobStore and (len(due) > _CROWD or self._behind):
            self._work_off(due, alias, store, now, events)
        else:
            self._for_each(due, len(due), alias, now, lambda job: events.extend(self._submit(job, alias, store, now)))
        if put_off := {job_id: until for (where, job_id), until in self._put_off.items() if where == alias}:
            others = (job.next_run_time for job in store.get_all_jobs() if job.id not in put_off)
            return [*put_off.values(), *(time.astimezone(UTC) for time in others if time is not None)]
        next_run_time = store.get_next_run_time()
        return [next_run_time.astimezone(UTC)] if next_run_time is not None else []

    def _work_off(
        self, due: list[Any], alias: str, store: Any, now: datetime, events: list[JobSubmissionEvent]
    ) -> None:
        """One portion of a crowd; the rest is still due when the store is asked again, at once."""
        behind = self._behind
        fresh = [job for job in due if behind.get((alias, job.id)) != job.next_run_time]
        if not due:  # what else was to be moved on was removed or changed meanwhile
            self._behind = {job: tick for job, tick in behind.items() if job[0] != alias}
            return
        if not fresh:
            self._for_each(due, _STEP, alias, now, lambda job: self._catch_up_with(job, alias, store, now))
            return

        def submit(job: Any) -> None:
            tick = job.next_run_time
            # The ticks of a cron trigger lie a second apart at least: no other one is due.
            if isinstance(job.trigger, CronTrigger) and tick.astimezone(UTC) > now - _SECOND:
                behind[alias, job.id] = tick
                events.extend(self._hand_over(job, alias, [tick]))
            else:
                events.extend(self._submit(job, alias, store, now))

        self._for_each(fresh, _PORTION, alias, now, submit)

    def _for_each(self, jobs: list[Any], most: int, alias: str, now: datetime, do: Callable[[Any], object]) -> None:
        """So many of them at the most. One that fails is put off alone: it is still due, looking at once would be a spin, and
        no other may have to wait for it."""
        for job in jobs[:most]:
            try:
                do(job)
            except Exception as error:
                logger.error("Job %s could not be moved on to its next tick (%s)", job.id, type(error).__name__)
                self._put_off[alias, job.id] = now + timedelta(seconds=self._scheduler.jobstore_retry_interval)

    def _catch_up_with(self, job: Any, alias: str, store: Any, now: datetime) -> None:
        following = job.trigger.get_next_fire_time(job.next_run_time, now)
        self._behind.pop((alias, job.id), None)
        self._move_on(job, following, alias, store, now)

    def _submit(self, job: Any, alias: str, store: Any, now: datetime) -> list[JobSubmissionEvent]:
        ticks: list[datetime] = []
        following = job.next_run_time
        while following is not None and following.astimezone(UTC) <= now:
            ticks.append(following)
            following = job.trigger.get_next_fire_time(following, now)
        if not ticks:
            return []
        events = self._hand_over(job, alias, ticks[-1:] if job.coalesce else ticks)
        self._move_on(job, following, alias, store, now)
        return events

    def _hand_over(self, job: Any, alias: str, ticks: list[datetime]) -> list[JobSubmissionEvent]:
        try:
            self._scheduler._lookup_executor(job.executor).submit_job(job, ticks)
        except MaxInstancesReachedError:
            logger.warning("Job %s was skipped: max_instances=%d runs of it are alive", job.id, job.max_instances)
            return [JobSubmissionEvent(EVENT_JOB_MAX_INSTANCES, job.id, alias, ticks)]
        except Exception:
            logger.exception("Job %s could not be submitted to its executor %r", job.id, job.executor)
            return []
        return [JobSubmissionEvent(EVENT_JOB_SUBMITTED, job.id, alias, ticks)]

    def _move_on(self, job: Any, following: datetime | None, alias: str, store: Any, now: datetime) -> None:
        if following is not None:
            job._modify(next_run_time=following)
            store.update_job(job)
        else:
            stock.exhausted(self._scheduler, job.id, alias, now, self._lease)
