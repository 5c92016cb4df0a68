"""APScheduler 3, unmodified: started only when elected, paused between terms, drained at the end.

Everything the user's scheduler runs passes one seam: the scheduler asks `_lookup_executor` where to send a due job, and
gets that executor behind a guard. The guard hands the inner executor a copy of the job whose function is ours; it runs in
the slot, immediately before the call, and calls the user's function only under a trusted term. `max_instances`,
`coalesce`, events and logs stay APScheduler's own.

Private names of APScheduler used here, and nowhere else (pinned by a test): scheduler `_lookup_executor`,
`_dispatch_event`, `_real_add_job`, `_process_jobs`, `_pending_jobs`, `_executors`, `_jobstores`; executor `_pool`; job store
`_reconstitute_job`; `Job.__slots__`.
"""

import asyncio
import inspect
import logging
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from apscheduler.events import EVENT_JOB_MISSED, JobExecutionEvent
from apscheduler.executors.pool import BasePoolExecutor, ThreadPoolExecutor
from apscheduler.job import Job
from apscheduler.jobstores.base import ConflictingIdError
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.util import iscoroutinefunction_partial

from .election import Duties
from .errors import ConfigurationError
from .records import JobView, Term

logger = logging.getLogger("fastapi_singleton")

_Pending = tuple[Any, str, bool]
_DEFAULT_GRACE = 1  # APScheduler's default misfire_grace_time: nobody chose it
_RANDOM_ID = re.compile(r"[0-9a-f]{32}")


_SLOTS = tuple(slot for slot in Job.__slots__ if slot != "__weakref__")


class _NotRun(Enum):
    """Returned by a guarded call that did not call the user's function, so that no event claims it did."""

    REFUSED = "this worker no longer leads"
    TOO_LATE = "the tick is older than it may be"


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


def job_key(job: Any) -> str:
    """The job's name across workers: its id, or module:function where APScheduler made up a random one."""
    if not _RANDOM_ID.fullmatch(job.id):
        return str(job.id)
    return str(job.func_ref or f"{job.func.__module__}:{getattr(job.func, '__qualname__', job.name)}")


class SchedulerDuties(Duties):
    """Runs the user's scheduler while this worker leads: `open` at the lifespan's start, `close` at its end."""

    def __init__(self, scheduler: Any, catch_up: float) -> None:
        check_scheduler(scheduler)
        self._scheduler = scheduler
        self._catch_up = catch_up
        self._trusted: Callable[[], Term | None] = lambda: None
        self._guards: dict[str, _Guard] = {}
        self._under_way: set[object] = set()
        self._lock = threading.Lock()
        self._said_idle_job = False
        self._definitions: list[tuple[_Pending, dict[str, Any]]] = []

    def open(self, trusted: Callable[[], Term | None]) -> None:
        """Put the guard in place. `trusted` tells, from any thread, whether this worker leads."""
        scheduler = self._scheduler
        check_scheduler(scheduler)
        self._trusted = trusted
        restored = {id(job) for (job, _, _), _ in self._definitions}
        added = {(alias, job_key(job)) for job, alias, _ in scheduler._pending_jobs if id(job) not in restored}
        # An application that adds its jobs inside its lifespan adds them anew beside those put back by `close`.
        scheduler._pending_jobs[:] = [
            (job, alias, replace)
            for job, alias, replace in scheduler._pending_jobs
            if id(job) not in restored or (alias, job_key(job)) not in added
        ]
        self._definitions = [
            (entry, {slot: getattr(entry[0], slot) for slot in _SLOTS if hasattr(entry[0], slot)})
            for entry in scheduler._pending_jobs
        ]
        # Instance attributes shadow the class's methods; `close` takes them away again.
        scheduler._lookup_executor = self._guarded_executor
        scheduler._dispatch_event = self._dispatch

    async def take_up(self, term: Term) -> None:
        if self._scheduler.running:
            self._skip_what_others_ran()
            self._scheduler.resume()
        else:
            self._start()

    def lay_down(self) -> None:
        if self._scheduler.running:
            self._scheduler.pause()

    def renewed(self) -> None:
        # Another process may have put a due job into a shared store, and nothing else would wake this scheduler.
        if self._scheduler.running:
            self._scheduler.wakeup()

    def standing_by(self) -> None:
        # Before its first term a scheduler is not started: a job added now waits in this worker's memory alone.
        if len(self._scheduler._pending_jobs) > len(self._definitions) and not self._said_idle_job:
            self._said_idle_job = True
            logger.warning(
                "A job was added on a worker that does not lead; it will run only if this worker is elected. "
                "Add jobs before the lifespan starts, in every worker, or use a persistent job store."
            )

    def jobs(self) -> Sequence[JobView]:
        return [
            JobView(
                id=job_key(job),
                trigger=str(job.trigger),
                next_run_at=job.next_run_time.astimezone(UTC) if getattr(job, "next_run_time", None) else None,
                paused=getattr(job, "next_run_time", UTC) is None,
            )
            for job in self._scheduler.get_jobs()
        ]

    async def drain(self, timeout: float) -> int:
        """Wait until nothing is under way any more, coroutines and threads alike; how many are left after `timeout`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while self._under_way and loop.time() < deadline:
            await asyncio.sleep(min(0.02, max(0.0, deadline - loop.time())))
        return len(self._under_way)

    async def close(self) -> None:
        """Stop the scheduler and leave it as it was found, so that the application may be started again."""
        scheduler = self._scheduler
        try:
            if scheduler.running:
                await self._shut_down()
        finally:
            for name in ("_lookup_executor", "_dispatch_event"):
                vars(scheduler).pop(name, None)
        for (job, _, _), state in self._definitions:
            for slot in _SLOTS:
                if slot in state:
                    setattr(job, slot, state[slot])
                elif hasattr(job, slot):
                    delattr(job, slot)
        scheduler._pending_jobs[:] = [entry for entry, _ in self._definitions]

    # -- starting, resuming, stopping --------------------------------------------------------------------------------

    def _start(self) -> None:
        scheduler = self._scheduler
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
            scheduler.start()
        except BaseException:
            # A start that failed half-way has filled the memory stores; empty them so that it can be tried again.
            for store in scheduler._jobstores.values():
                if isinstance(store, MemoryJobStore):
                    store.remove_all_jobs()
            raise
        finally:
            del scheduler._real_add_job

    def _skip_what_others_ran(self) -> None:
        """A paused scheduler still holds the ticks that fell due meanwhile; other leaders had those."""
        now = datetime.now(self._scheduler.timezone)
        for alias, store in list(self._scheduler._jobstores.items()):
            if not isinstance(store, MemoryJobStore):
                continue  # shared: the other leaders have moved its jobs on themselves
            for job in store.get_all_jobs():
                if job.next_run_time is None or job.next_run_time > now:
                    continue
                upcoming = job.trigger.get_next_fire_time(None, now)
                if upcoming is None or upcoming <= now:
                    self._scheduler.remove_job(job.id, alias)
                else:
                    self._scheduler.modify_job(job.id, alias, next_run_time=upcoming)

    async def _shut_down(self) -> None:
        scheduler = self._scheduler
        executors = dict(scheduler._executors)
        # A pool that was shut down never works again; idle, it is ended by the interpreter like any other pool.
        for alias, executor in executors.items():
            if isinstance(executor, BasePoolExecutor):
                del scheduler._executors[alias]
        try:
            if isinstance(scheduler, AsyncIOScheduler):
                scheduler.shutdown(wait=False)
                while scheduler.running:  # it only asks the loop to do it
                    await asyncio.sleep(0)
            else:
                # Its thread looks for due jobs once more on the way out, and would move them on in a shared store.
                scheduler._process_jobs = lambda: None
                await asyncio.to_thread(scheduler.shutdown, wait=False)
        finally:
            vars(scheduler).pop("_process_jobs", None)
            scheduler._executors.update(executors)

    # -- the guard ---------------------------------------------------------------------------------------------------

    def _guarded_executor(self, alias: str) -> "_Guard":
        executor = self._scheduler._executors.get(alias)
        guard = self._guards.get(alias)
        if guard is None or guard.inner is not executor:
            guard = self._guards[alias] = _Guard(executor, alias, self)
        return guard

    def _dispatch(self, event: Any) -> None:
        not_run = getattr(event, "retval", None)
        if not_run is _NotRun.REFUSED:
            return
        if not_run is _NotRun.TOO_LATE:
            event = JobExecutionEvent(EVENT_JOB_MISSED, event.job_id, event.jobstore, event.scheduled_run_time)
        type(self._scheduler)._dispatch_event(self._scheduler, event)

    @contextmanager
    def submitted(self, calls: int) -> Iterator[Callable[[], None]]:
        """Counts a submission as under way until it has made all its calls; yields what marks one of them as done."""
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

    def obstacle(self, job: Any, tick: datetime) -> _NotRun | None:
        """Asked in the slot, immediately before the call: why this tick must not run now."""
        if self._trusted() is None:
            obstacle = _NotRun.REFUSED
        elif (datetime.now(UTC) - tick).total_seconds() > self._latest_start(job):
            obstacle = _NotRun.TOO_LATE
        else:
            return None
        logger.warning("Job %s due at %s was not run: %s", job.id, tick, obstacle.value, extra={"job": job.id})
        return obstacle

    def _latest_start(self, job: Any) -> float:
        """How late a tick may start: `catch_up`, narrowed by a misfire_grace_time that the user has set."""
        grace = job.misfire_grace_time
        return self._catch_up if grace in (None, _DEFAULT_GRACE) else min(self._catch_up, grace)


class _Guard:
    """Stands before one of the user's executors. `inner` is None where no executor has that alias."""

    def __init__(self, inner: Any, alias: str, duties: SchedulerDuties) -> None:
        self.inner = inner
        self._alias = alias
        self._duties = duties
        self._slots = inner
        self._in_process_pool = isinstance(getattr(inner, "_pool", None), ProcessPoolExecutor)
        if self._in_process_pool:
            # A thread per child: it asks for trust right before the child is given the work, waits for the answer,
            # and so notices a child that dies, for which APScheduler has no event.
            self._slots = ThreadPoolExecutor(inner._pool._max_workers)
            self._slots.start(inner._scheduler, alias)

    def submit_job(self, job: Any, run_times: Sequence[datetime]) -> None:
        if self.inner is None:
            # Stock APScheduler deletes such a job from the store, for every other version of the application too.
            logger.error("Job %s names the executor %r, which this worker does not have", job.id, self._alias)
            return
        if job.func is _unknown_function:
            logger.error("Job %s calls %s, which this worker does not have", job.id, job.func_ref)
            return
        with self._duties.submitted(len(run_times)) as done:
            guarded = Job.__new__(Job)
            for slot in _SLOTS:
                if hasattr(job, slot):
                    setattr(guarded, slot, getattr(job, slot))
            guarded.func = self._guard(job, iter(run_times), done)
            # Lateness is judged in the slot; judged by APScheduler, a tick would vanish without our knowing.
            guarded.misfire_grace_time = None
            self._slots.submit_job(guarded, run_times)

    def _guard(self, job: Any, ticks: Iterator[datetime], done: Callable[[], None]) -> Callable[..., Any]:
        """The function the executor calls once for each tick, in their order."""
        if iscoroutinefunction_partial(job.func):

            async def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    return self._duties.obstacle(job, next(ticks)) or await job.func(*args, **kwargs)
                finally:
                    done()

            return run

        call = self._call_in_child if self._in_process_pool else _call

        def run_in_slot(*args: Any, **kwargs: Any) -> Any:
            try:
                return self._duties.obstacle(job, next(ticks)) or call(job.func, args, kwargs)
            finally:
                done()

        return run_in_slot

    def _call_in_child(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        pool = self.inner._pool
        try:
            return pool.submit(func, *args, **kwargs).result()
        except BrokenProcessPool:
            # One dead child breaks a whole pool for good: the next job gets a new one.
            if self.inner._pool is pool:
                self.inner._pool = type(pool)(pool._max_workers, **self.inner.pool_kwargs)
            raise

    def shutdown(self, wait: bool = True) -> None:
        if self._slots is not self.inner:
            self._slots.shutdown(wait)
        if self.inner is not None:
            self.inner.shutdown(wait)


def _call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _keep_unknown_jobs(store: Any) -> None:
    """Let a shared store keep jobs whose function this version of the application lacks; stock, listing deletes them."""
    restore = getattr(store, "_reconstitute_job", None)
    if restore is None or "_reconstitute_job" in vars(store):
        return

    def restore_or_keep(state: Any) -> Any:
        try:
            return restore(state)
        except Exception:
            fields = dict(pickle.loads(state))
            job = Job.__new__(Job)
            job.func, job.func_ref = _unknown_function, fields.pop("func")
            for slot in _SLOTS:
                if slot in fields:
                    setattr(job, slot, fields[slot])
            job._scheduler, job._jobstore_alias = store._scheduler, store._alias
            return job

    store._reconstitute_job = restore_or_keep


def _unknown_function(*args: Any, **kwargs: Any) -> None:
    """Stands for a function of another version; never called, only recognised."""
