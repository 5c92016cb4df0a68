"""Stands before each of the user's executors, so that every tick passes: slot → trusted term → claim → run → record.

The scheduler asks `_lookup_executor` where to send a due job, and gets that executor behind a guard. The guard hands it a
stand-in for the job whose function is ours. It is called in the slot, once for each tick, and claims the tick immediately
before it calls the user's function: a batch claimed ahead would be a batch of claimed, never run ticks after a kill.
`coalesce`, events and logs stay APScheduler's own; so does `max_instances` for the runs of this worker, and the claim counts
those of the whole fleet.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime
from itertools import islice
from typing import Any

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.executors.base import MaxInstancesReachedError
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.util import iscoroutinefunction_partial

from ..catching_up import INSTANT, MOST_MISSED, has_jitter, ticks_from
from ..jobs import call_as
from ..records import Run
from .gate import Due, Gate, NotRun, Submission
from .stock import tick_of, unknown_function

logger = logging.getLogger("fastapi_singleton")


class _StandIn:
    """A job as its executor sees it: the user's, but for the function it calls and the lateness it judges."""

    __slots__ = ("_job", "_jobstore_alias", "args", "func", "id", "kwargs", "max_instances", "misfire_grace_time")

    def __init__(self, job: Any, func: Callable[..., Any], waiting: int) -> None:
        self._job = job
        self.func = func
        # Lateness is judged by the claim; judged by APScheduler, a tick would vanish without our knowing.
        self.misfire_grace_time = None
        # What every executor asks for; the rest is looked up.
        self.id = job.id
        self.args = job.args
        self.kwargs = job.kwargs
        # APScheduler counts submissions, and those that wait for their verdict are not runs yet.
        self.max_instances = job.max_instances + waiting
        self._jobstore_alias = job._jobstore_alias

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def __str__(self) -> str:
        return str(self._job)


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
            self._gate.remark(job, ticks, f"its executor did not take it ({type(error).__name__}: {error})")
            raise

    def submit(self, job: Any, due: Sequence[Due]) -> None:
        if self._is_of_another_version(job):
            return
        key = self._gate.names.of(job)
        waiting = self._gate.waiting(key)
        submission = self._gate.submitted(key, len(due))
        guarded = self._guarded(key, job, iter(due), submission)
        try:
            self._slots.submit_job(_StandIn(job, guarded, waiting), [each.tick for each in due])
        except BaseException:
            submission.withdraw()
            raise

    def _is_of_another_version(self, job: Any) -> bool:
        """Such a job is left alone. Stock APScheduler would delete it from the store, for every other version too."""
        if self.inner is None:
            logger.error("Job %s names the executor %r, which this worker does not have", job.id, self._alias)
        elif job.func is unknown_function:
            logger.error("Job %s calls %s, which this worker does not have", job.id, job.func_ref)
        else:
            return False
        return True

    def _guarded(self, key: str, job: Any, due: Iterator[Due], submission: Submission) -> Callable[..., Any]:
        """The function the executor calls once for each tick, in their order."""
        # Kept apart from the job, which may be modified while this waits for its slot.
        gate, func = self._gate, job.func
        if self._awaits and iscoroutinefunction_partial(func):

            async def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    claimed = await gate.admit(key, job, next(due))
                    if isinstance(claimed, NotRun):
                        return claimed
                    with gate.recorded(claimed, submission):
                        return await func(*args, **kwargs)
                finally:
                    submission.made()

            return run

        call = self._call_in_child if self._in_process_pool else _call

        def run_in_slot(*args: Any, **kwargs: Any) -> Any:
            try:
                claimed = gate.admit_from_thread(key, job, next(due))
                if isinstance(claimed, NotRun):
                    return claimed
                with gate.recorded(claimed, submission) as run:
                    return call(run, func, args, kwargs)
            finally:
                submission.made()

        return run_in_slot

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
        """Let go of the threads that wait for a process pool's children; the pool itself is the user's."""
        if self._slots is not self.inner:
            self._slots.shutdown(wait=False)


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
