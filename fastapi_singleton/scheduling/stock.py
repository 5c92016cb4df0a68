"""What is used of APScheduler's insides, in one place. The private names, each pinned by a test:

scheduler `_lookup_executor`, `_lookup_job`, `_dispatch_event`, `_real_add_job`, `_process_jobs`, `_pending_jobs`, `_executors`,
`_jobstores`, `_jobstores_lock`, `_thread`; executor `_pool`; job store `_reconstitute_job`; `Job.__slots__`, `Job._modify`.
"""

import asyncio
import inspect
import logging
import pickle
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from apscheduler.events import EVENT_JOB_REMOVED, JobEvent
from apscheduler.executors.pool import BasePoolExecutor
from apscheduler.job import Job
from apscheduler.jobstores.base import ConflictingIdError, JobLookupError
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from ..catching_up import has_jitter
from ..errors import ConfigurationError

logger = logging.getLogger("fastapi_singleton")

Pending = tuple[Any, str, bool]

_RANDOM_ID = re.compile(r"[0-9a-f]{32}")
_SLOTS = tuple(slot for slot in Job.__slots__ if slot != "__weakref__")


def check_scheduler(scheduler: Any) -> None:
    """Refuse what cannot be led: anything but the two schedulers a web worker can run beside its requests."""
    if scheduler is None:
        return
    if inspect.isclass(scheduler) or not isinstance(scheduler, AsyncIOScheduler | BackgroundScheduler):
        kind = scheduler.__name__ if inspect.isclass(scheduler) else type(scheduler).__name__
        raise ConfigurationError(
            f"{kind} is not a scheduler that fastapi_singleton can run.",
            hint="pass an instance of APScheduler 3's AsyncIOScheduler or BackgroundScheduler.",
        )
    if scheduler.running:
        raise ConfigurationError(
            "The scheduler is already running in this worker.",
            hint="remove scheduler.start(): fastapi_singleton starts it in the worker that leads.",
        )


def unfit_for_race(trigger: Any) -> str | None:
    """Why workers could not agree on a trigger's ticks; None if they can."""
    if has_jitter(trigger):
        return "it has a jitter. Hint: in mode='race' all workers must agree on the ticks; leave it out, or use mode='leader'."
    parts = getattr(trigger, "triggers", ())
    if any(isinstance(part, IntervalTrigger | CalendarIntervalTrigger) for part in parts):
        return "it combines an interval with other triggers. Hint: in mode='race' make it several jobs, or use cron."
    if (
        isinstance(trigger, CalendarIntervalTrigger)
        and trigger.start_date > (datetime.now(UTC) - timedelta(days=2)).date()
    ):
        return (
            "its interval starts with this process. Hint: in mode='race' give it a start_date, some days ago at least."
        )
    return None


def check_for_race(scheduler: Any) -> None:
    """Refuse what cannot be raced for: ticks that differ from worker to worker, and a store that shows each tick to one
    worker alone, with whose death it would be lost."""
    for alias in scheduler._jobstores:
        if is_shared(scheduler, alias):
            raise ConfigurationError(
                f"The job store {alias!r} cannot be used in mode='race'.",
                hint="there every worker keeps its jobs in memory and fires them itself: leave the job store out, or use "
                "mode='leader'.",
            )
    for job, _, _ in scheduler._pending_jobs:
        if reason := unfit_for_race(job.trigger):
            what, _, hint = reason.partition(" Hint: ")
            raise ConfigurationError(f"The job {job.name} cannot be raced for: {what}", hint=hint)


def job_key(job: Any, *, shared: bool = False) -> str:
    """The job's name across workers: its id, or module:function where APScheduler made up a random one. In a shared
    store every worker reads the same id, random or not."""
    if shared or not _RANDOM_ID.fullmatch(job.id):
        return str(job.id)
    return str(job.func_ref or f"{job.func.__module__}:{getattr(job.func, '__qualname__', job.name)}")


def state_of(job: Any) -> dict[str, Any]:
    return {slot: getattr(job, slot) for slot in _SLOTS if hasattr(job, slot)}


def restore(job: Any, state: dict[str, Any]) -> None:
    for slot in _SLOTS:
        if slot in state:
            setattr(job, slot, state[slot])
        elif hasattr(job, slot):
            delattr(job, slot)


def start_paused(scheduler: Any) -> None:
    """Start without firing anything; a job that a shared store already has stays as it is there."""
    for store in scheduler._jobstores.values():
        _keep_unknown_jobs(store)
    add = scheduler._real_add_job

    def add_unless_stored(job: Any, alias: str, replace_existing: bool) -> None:
        try:
            add(job, alias, replace_existing)
        except ConflictingIdError:
            # An earlier leader put it into the shared store, and the user did not ask to replace it.
            logger.info("Job %s is already in the job store %s and stays as it is", job.id, alias)

    scheduler._real_add_job = add_unless_stored
    try:
        scheduler.start(paused=True)
    except BaseException:
        # A start that failed half-way has filled the memory stores; empty them so that it can be tried again.
        for store in scheduler._jobstores.values():
            if isinstance(store, MemoryJobStore):
                store.remove_all_jobs()
        raise
    finally:
        del scheduler._real_add_job


def process_jobs_as_usual(scheduler: Any) -> None:
    vars(scheduler).pop("_process_jobs", None)


def tick_of(job: Any, run_time: datetime) -> datetime:
    """Which tick a run time stands for: a date's own date, however often it has been put off."""
    tick: datetime = job.trigger.run_date if is_date(job) else run_time
    return tick.astimezone(UTC)


def exhausted(scheduler: Any, job_id: str, alias: str, now: datetime, lease: float) -> None:
    """The job has no further tick. Stock APScheduler removes it when it submits the last, before anybody has claimed it;
    from a shared store, where nobody else would find it again, a date is removed only once it has been accounted for."""
    job = scheduler._jobstores[alias].lookup_job(job_id)
    if job is not None and is_shared_date(scheduler, job):
        scheduler.modify_job(job_id, alias, next_run_time=now + timedelta(seconds=lease))
    else:
        remove(scheduler, job_id, alias)


class QuietRemoval(JobEvent):  # type: ignore[misc]
    """A removal that is not the application's doing, so that the fleet need not remember it."""


def remove(scheduler: Any, job_id: str, alias: str) -> None:
    """Remove a job that has done its work, or was removed before."""
    with suppress(JobLookupError):
        scheduler._jobstores[alias].remove_job(job_id)
        scheduler._dispatch_event(QuietRemoval(EVENT_JOB_REMOVED, job_id, alias))


def is_shared(scheduler: Any, alias: str) -> bool:
    """Whether other processes read the same store. The default one is made at the scheduler's start, in memory."""
    store = scheduler._jobstores.get(alias)
    return store is not None and not isinstance(store, MemoryJobStore)


def thread_of(scheduler: Any) -> int | None:
    """The thread in which it looks for due jobs, if it has one of its own."""
    return getattr(getattr(scheduler, "_thread", None), "ident", None)


def is_date(job: Any) -> bool:
    return isinstance(job.trigger, DateTrigger)


def is_shared_date(scheduler: Any, job: Any) -> bool:
    return is_date(job) and is_shared(scheduler, job._jobstore_alias)


async def shut_down(scheduler: Any) -> None:
    """Stop the scheduler; coroutine jobs still running are cancelled. It can be started again."""
    executors = dict(scheduler._executors)
    # A pool that was shut down never works again.
    for alias, executor in executors.items():
        if isinstance(executor, BasePoolExecutor):
            del scheduler._executors[alias]
    # A thread looks for due jobs once more on the way out, and would move them on in a shared store.
    scheduler._process_jobs = lambda: None
    try:
        if isinstance(scheduler, AsyncIOScheduler):
            scheduler.shutdown(wait=False)
            while scheduler.running:  # it only asks the loop to do it
                await asyncio.sleep(0)
        else:
            await asyncio.to_thread(scheduler.shutdown, wait=False)
    finally:
        process_jobs_as_usual(scheduler)
        scheduler._executors.update(executors)


def _keep_unknown_jobs(store: Any) -> None:
    """Let a shared store keep jobs whose function this version of the application lacks; stock, listing deletes them."""
    reconstitute = getattr(store, "_reconstitute_job", None)
    if reconstitute is None or "_reconstitute_job" in vars(store):
        return

    def restore_or_keep(state: Any) -> Any:
        try:
            return reconstitute(state)
        except Exception:
            fields = dict(pickle.loads(state))
            job = Job.__new__(Job)
            job.func, job.func_ref = unknown_function, fields.pop("func")
            for slot in _SLOTS:
                if slot in fields:
                    setattr(job, slot, fields[slot])
            job._scheduler, job._jobstore_alias = store._scheduler, store._alias
            return job

    store._reconstitute_job = restore_or_keep


def unknown_function(*args: Any, **kwargs: Any) -> None:
    """Stands for a function of another version; never called, only recognised."""
