"""Looks for due jobs, in place of the scheduler's own `_process_jobs`. As there, but for:

- *Whose clock.* The store's, so that a host whose clock is minutes off fires the same ticks as any other. In UTC: two times of
  one zone are compared by the wall clock, so that in the hour that comes twice jobs would be due an hour early.
- *How many at a time.* A thousand jobs due together neither hold up requests nor wait for each other's claims: some are
  submitted, and the others are still due when the scheduler looks again, at once.
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

from . import stock

logger = logging.getLogger("fastapi_singleton")

_PORTION = 250


class Looking:
    """One scheduler's look-out: called whenever it wakes, it says after how many seconds it wants to be called again."""

    def __init__(self, scheduler: Any, now: Callable[[], datetime], lease: float) -> None:
        self._scheduler = scheduler
        self._now = now
        self._lease = lease

    def __call__(self) -> float | None:
        scheduler = self._scheduler
        if scheduler.state == STATE_PAUSED:
            return None
        now = self._now()
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
        due = store.get_due_jobs(now)
        failure: Exception | None = None
        # A store in memory is quickly asked again.
        for job in due[:_PORTION] if type(store) is MemoryJobStore else due:
            try:
                events += self._submit(job, alias, store, now)
            except Exception as error:
                logger.error("Job %s could not be moved on to its next tick (%s)", job.id, type(error).__name__)
                failure = error
        if failure is not None:
            raise failure  # it is still due, and looking at once would be a spin
        next_run_time = store.get_next_run_time()
        return [next_run_time.astimezone(UTC)] if next_run_time is not None else []

    def _submit(self, job: Any, alias: str, store: Any, now: datetime) -> list[JobSubmissionEvent]:
        ticks: list[datetime] = []
        following = job.next_run_time
        while following is not None and following.astimezone(UTC) <= now:
            ticks.append(following)
            following = job.trigger.get_next_fire_time(following, now)
        if not ticks:
            return []
        ticks = ticks[-1:] if job.coalesce else ticks
        code: int | None = EVENT_JOB_SUBMITTED
        try:
            self._scheduler._lookup_executor(job.executor).submit_job(job, ticks)
        except MaxInstancesReachedError:
            logger.warning("Job %s was skipped: max_instances=%d runs of it are alive", job.id, job.max_instances)
            code = EVENT_JOB_MAX_INSTANCES
        except Exception:
            logger.exception("Job %s could not be submitted to its executor %r", job.id, job.executor)
            code = None
        if following is not None:
            job._modify(next_run_time=following)
            store.update_job(job)
        else:
            stock.exhausted(self._scheduler, job.id, alias, now, self._lease)
        return [JobSubmissionEvent(code, job.id, alias, ticks)] if code is not None else []
