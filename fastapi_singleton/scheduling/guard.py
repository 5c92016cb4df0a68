"""Stands before each of the user's executors, so that every tick passes: slot → trusted term → claim → run → record.

The scheduler asks `_lookup_executor` where to send a due job, and gets that executor behind a guard. The guard hands it a
copy of the job whose function is ours. It is called in the slot, once for each tick, and claims the tick immediately before
it calls the user's function: a batch claimed ahead would be a batch of claimed, never run ticks after a kill. `max_instances`,
`coalesce`, events and logs stay APScheduler's own.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from itertools import islice
from typing import Any, Protocol

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.executors.base import MaxInstancesReachedError
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.util import iscoroutinefunction_partial

from ..catching_up import INSTANT, MOST_MISSED, ticks_from
from ..jobs import call_as
from ..records import Cause, Entry, Run
from .stock import copy_of, tick_of, unknown_function

logger = logging.getLogger("fastapi_singleton")


class NotRun(Enum):
    """Returned by a guarded call that did not call the user's function, so that no event claims it did."""

    REFUSED = "this worker no longer leads"
    TAKEN = "it has been run or accounted for"
    TOO_LATE = "it is older than it may be"


@dataclass(frozen=True)
class Due:
    """A tick to be run, and why. `latest` is when it may start at the latest, where the job's own rule does not say."""

    tick: datetime
    attempt: int = 1
    cause: Cause = "schedule"
    latest: datetime | None = None


class Gate(Protocol):
    """What the guard asks before and tells after each call."""

    def submitted(self, calls: int) -> AbstractContextManager[Callable[[], None]]:
        """Count a submission as under way until it has made all its calls; yields what marks one of them as done."""

    def key(self, job: Any) -> str:
        """The job's name across workers."""

    async def admit(self, key: str, job: Any, due: Due) -> Entry | NotRun:
        """Claim the tick, or say why it must not run here and now."""

    def admit_from_thread(self, key: str, job: Any, due: Due) -> Entry | NotRun:
        """The same, from a thread that may wait."""

    def recorded(self, entry: Entry) -> AbstractContextManager[Run]:
        """While the block lasts this is the current run; how it ends is written down."""

    def remark(self, job: Any, ticks: Sequence[datetime], reason: str) -> None:
        """Write down ticks that are not run, and why."""


class Guard:
    """Stands before one of the user's executors. `inner` is None where no executor has that alias."""

    def __init__(self, inner: Any, alias: str, gate: Gate) -> None:
        self.inner = inner
        self._alias = alias
        self._gate = gate
        self._slots = inner
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
        ticks = [tick for run_time in run_times if (tick := tick_of(job, run_time))]
        if job.coalesce:
            self._gate.remark(job, _coalesced(job, run_times[-1]), f"coalesced into {ticks[-1]}")
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
        with self._gate.submitted(len(due)) as done:
            guarded = copy_of(job)
            guarded.func = self._guarded(self._gate.key(job), job, iter(due), done)
            # Lateness is judged by the claim; judged by APScheduler, a tick would vanish without our knowing.
            guarded.misfire_grace_time = None
            self._slots.submit_job(guarded, [each.tick for each in due])

    def _is_of_another_version(self, job: Any) -> bool:
        """Such a job is left alone. Stock APScheduler would delete it from the store, for every other version too."""
        if self.inner is None:
            logger.error("Job %s names the executor %r, which this worker does not have", job.id, self._alias)
        elif job.func is unknown_function:
            logger.error("Job %s calls %s, which this worker does not have", job.id, job.func_ref)
        else:
            return False
        return True

    def _guarded(self, key: str, job: Any, due: Iterator[Due], done: Callable[[], None]) -> Callable[..., Any]:
        """The function the executor calls once for each tick, in their order."""
        gate = self._gate
        if isinstance(self.inner, AsyncIOExecutor) and iscoroutinefunction_partial(job.func):

            async def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    claimed = await gate.admit(key, job, next(due))
                    if isinstance(claimed, NotRun):
                        return claimed
                    with gate.recorded(claimed):
                        return await job.func(*args, **kwargs)
                finally:
                    done()

            return run

        call = self._call_in_child if self._in_process_pool else _call

        def run_in_slot(*args: Any, **kwargs: Any) -> Any:
            try:
                claimed = gate.admit_from_thread(key, job, next(due))
                if isinstance(claimed, NotRun):
                    return claimed
                with gate.recorded(claimed) as run:
                    return call(run, job.func, args, kwargs)
            finally:
                done()

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
        if self._slots is not self.inner:
            self._slots.shutdown(wait)
        if self.inner is not None:
            self.inner.shutdown(wait)


def _call(run: Run, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("A coroutine function needs an AsyncIOScheduler and its default executor.")
    return result


def _coalesced(job: Any, latest: datetime) -> list[datetime]:
    """The ticks that APScheduler has left out in favour of the latest."""
    if getattr(job.trigger, "jitter", None):
        return []  # drawn anew each time it is asked
    ticks = ticks_from(job.trigger, job.next_run_time, latest - INSTANT)
    return list(islice(ticks, MOST_MISSED))
