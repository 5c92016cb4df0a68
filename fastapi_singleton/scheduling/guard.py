"""Stands before each of the user's executors, so that every tick passes: slot → trusted term → claim → run → record.

The scheduler asks `_lookup_executor` where to send a due job, and gets that executor behind a guard. The guard hands it a
stand-in for the job whose function is ours. It is called in the slot, once for each tick, and claims the tick immediately
before it calls the user's function: a batch claimed ahead would be a batch of claimed, never run ticks after a kill.
`coalesce`, events and logs stay APScheduler's own; so does `max_instances` for the runs of this worker, and the claim counts
those of the whole fleet.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import ThreadPoolExecutor as Threads
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime
from itertools import islice
from typing import Any

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.executors.base import MaxInstancesReachedError, run_job
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.util import iscoroutinefunction_partial

from ..catching_up import INSTANT, MOST_MISSED, has_jitter, ticks_from
from ..errors import described
from ..jobs import call_as
from ..records import Run
from ..timing import boot_clock
from .gate import Due, Gate, NotRun
from .stock import tick_of, unknown_function

logger = logging.getLogger("fastapi_singleton")

_Calling = Callable[[Run, Callable[..., Any], Any, Any], Any]


class _Submission:
    """Ticks of one job on their way through an executor, which takes this for the job: the user's, but for the function it
    calls, once for each tick in their order, and the lateness it judges.

    One object for all of it: a thousand of them may wait for their claims, and whatever waits is looked at by Python's
    garbage collection.
    """

    __slots__ = (
        "_call", "_due", "_func", "_gate", "_job", "_jobstore_alias", "_told", "args", "id", "key", "kwargs",
        "max_instances", "misfire_grace_time",
    )  # fmt: skip

    def __init__(self, gate: Gate, key: str, job: Any, due: Sequence[Due], call: _Calling | None) -> None:
        self._gate = gate
        self.key = key
        self._job = job
        # Kept apart from the job, which may be modified while this waits for its slot.
        self._func = job.func
        self._due = due
        self._told = 0  # for how many of them the gate has given its verdict
        self._call = call
        # Lateness is judged by the claim; judged by APScheduler, a tick would vanish without our knowing.
        self.misfire_grace_time = None
        # What every executor asks for; the rest is looked up.
        self.id = job.id
        self.args = job.args
        self.kwargs = job.kwargs
        # APScheduler counts submissions, and those that wait for their verdict are not runs yet.
        self.max_instances = job.max_instances + gate.waiting(key)
        self._jobstore_alias = job._jobstore_alias
        gate.submitted(key, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def __str__(self) -> str:
        return str(self._job)

    @property
    def func(self) -> Callable[..., Any]:
        # Made anew each time: kept, it would be a circle that only the garbage collection ends.
        return self._run_in_slot if self._call is not None else self._run

    async def _run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            try:
                claimed = await self._gate.admit(self.key, self._job, self._due[self._told])
            finally:
                self._told += 1
            if isinstance(claimed, NotRun):
                return claimed
            with self._gate.recorded(claimed):
                return await self._func(*args, **kwargs)
        finally:
            self._made()

    def _run_in_slot(self, *args: Any, **kwargs: Any) -> Any:
        assert self._call is not None
        try:
            try:
                claimed = self._gate.admit_from_thread(self.key, self._job, self._due[self._told])
            finally:
                self._told += 1
            if isinstance(claimed, NotRun):
                return claimed
            with self._gate.recorded(claimed) as run:
                return self._call(run, self._func, args, kwargs)
        finally:
            self._made()

    def _made(self) -> None:
        """One of the calls has been made, or is not to be. They follow each other, so that no lock is needed."""
        if not self.waiting:
            self._gate.done(self.key, self)

    @property
    def waiting(self) -> Sequence[Due]:
        """The ticks that have no verdict yet."""
        return self._due[self._told :]

    def withdraw(self) -> None:
        """None of the calls will be made."""
        if self.waiting:
            self._told = len(self._due)
            self._gate.done(self.key, self)


class _AsyncIOThreads(AsyncIOExecutor):  # type: ignore[misc]
    """What AsyncIOExecutor does with a function that is not awaited, on threads of its own in place of the event loop's.

    Those belong to the application, which also resolves host names on them: full of jobs that wait for the store to
    answer their claims, they would keep everybody from connecting to it again.
    """

    def start(self, scheduler: Any, alias: str) -> None:
        super().start(scheduler, alias)
        self._threads = Threads(thread_name_prefix=f"fastapi_singleton_{alias}")

    def _do_submit_job(self, job: Any, run_times: Sequence[datetime]) -> None:
        def callback(future: Any) -> None:
            self._pending_futures.discard(future)
            try:
                events = future.result()
            except BaseException as error:
                self._run_job_error(job.id, error, error.__traceback__)
            else:
                self._run_job_success(job.id, events)

        future = self._eventloop.run_in_executor(
            self._threads, run_job, job, job._jobstore_alias, run_times, self._logger.name
        )
        future.add_done_callback(callback)
        self._pending_futures.add(future)

    def shutdown(self, wait: bool = True) -> None:
        super().shutdown(wait)
        self._threads.shutdown(wait=False)


class Guard:
    """Stands before one of the user's executors. `inner` is None where no executor has that alias."""

    def __init__(self, inner: Any, alias: str, gate: Gate) -> None:
        self.inner = inner
        self._alias = alias
        self._gate = gate
        self._slots = inner
        self._awaits = isinstance(inner, AsyncIOExecutor)
        self._in_process_pool = isinstance(getattr(inner, "_pool", None), ProcessPoolExecutor)
        if self._in_process_pool:
            # A thread per child: it claims right before the child is given the work, waits for the answer, and so
            # notices a child that dies, for which APScheduler has no event.
            self._slots = ThreadPoolExecutor(inner._pool._max_workers)
            self._slots.start(inner._scheduler, alias)
        self._threads: _AsyncIOThreads | None = None

    def submit_job(self, job: Any, run_times: Sequence[datetime]) -> None:
        """What the scheduler calls with the ticks that fell due."""
        if self._is_of_another_version(job):
            return
        ticks = [tick_of(job, run_time) for run_time in run_times]
        if job.coalesce and (coalesced := _coalesced(job, run_times[-1])):
            self._gate.remark(job, coalesced, f"coalesced into {ticks[-1]}")
        try:
            self.submit(job, [Due(tick) for tick in ticks])
        except MaxInstancesReachedError:
            self._gate.remark(job, ticks, f"max_instances={job.max_instances} runs of it were still alive")
            raise
        except Exception as error:
            self._gate.remark(job, ticks, f"its executor did not take it ({described(error)})")
            raise

    def submit(self, job: Any, due: Sequence[Due]) -> bool:
        """Whether this worker can run it at all."""
        if self._is_of_another_version(job):
            return False
        calling = self._calling(job.func)
        submission = _Submission(self._gate, self._gate.names.of(job), job, due, calling)
        try:
            slots = self._slots if calling is None or not self._awaits else self._own_threads()
            slots.submit_job(submission, [each.tick for each in due])
        except BaseException:
            submission.withdraw()
            raise
        return True

    def _own_threads(self) -> _AsyncIOThreads:
        if self._threads is None:
            self._threads = _AsyncIOThreads()
            self._threads.start(self.inner._scheduler, self._alias)
        return self._threads

    def _calling(self, func: Callable[..., Any]) -> _Calling | None:
        """How a function is called from the executor's slot; None for one that is awaited."""
        if self._awaits and iscoroutinefunction_partial(func):
            return None
        return self._call_in_child if self._in_process_pool else _call

    def _is_of_another_version(self, job: Any) -> bool:
        """Such a job is left alone. Stock APScheduler would delete it from the store, for every other version too."""
        if self.inner is None:
            logger.error("Job %s names the executor %r, which this worker does not have", job.id, self._alias)
        elif job.func is unknown_function:
            logger.error("Job %s calls %s, which this worker does not have", job.id, job.func_ref)
        else:
            return False
        return True

    def _call_in_child(self, run: Run, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        pool = self.inner._pool
        try:
            return pool.submit(call_as, run, func, args, kwargs).result()
        except BrokenProcessPool:
            # One dead child breaks a whole pool for good: the next job gets a new one.
            if self.inner._pool is pool:
                self.inner._pool = type(pool)(pool._max_workers, **self.inner.pool_kwargs)
            raise

    def shutdown(self, wait: bool = True) -> None:
        """What the scheduler calls for an executor that is removed."""
        self.close()
        if self.inner is not None:
            self.inner.shutdown(wait)

    def close(self) -> None:
        """Let go of the threads that wait for claims, and for a process pool's children; the pool itself is the user's."""
        if self._slots is not self.inner:
            self._slots.shutdown(wait=False)
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    async def dismiss_children(self, timeout: float) -> None:
        """End the children of a process pool: servers end by a signal, which the interpreter does not get to see, and idle
        children would wait for ever. What runs is waited for, that long at most; a pool for another start stands ready."""
        pool: Any = getattr(self.inner, "_pool", None)
        manager = getattr(pool, "_executor_manager_thread", None)  # None: no child was ever needed
        if manager is None:
            return
        self.inner._pool = type(pool)(pool._max_workers, **self.inner.pool_kwargs)
        pool.shutdown(wait=False)
        deadline = boot_clock() + timeout
        while manager.is_alive() and boot_clock() < deadline:  # on no thread of the loop's: they may all be busy
            await asyncio.sleep(0.01)


def _call(run: Run, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("A coroutine function needs an AsyncIOScheduler and its default executor.")
    return result


def _coalesced(job: Any, latest: datetime) -> list[datetime]:
    """The ticks that APScheduler has left out in favour of the latest."""
    if job.next_run_time == latest or has_jitter(job.trigger):  # jitter is drawn anew each time
        return []
    return list(islice(ticks_from(job.trigger, job.next_run_time, latest - INSTANT), MOST_MISSED))
