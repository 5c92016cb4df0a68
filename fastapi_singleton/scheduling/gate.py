"""Between a tick and its run: trusted term? → claim → run → how it ended.

A thousand jobs may come through in the same second, so that this is written with an eye on what each step costs.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from contextvars import Token
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from types import TracebackType
from typing import Any, Protocol

from ..errors import ConfigurationError, described
from ..jobs import enter_run, leave_run, policy_of
from ..ledger import Ledger
from ..records import UNBEGUN, Cause, Ending, Entry, Run, Term, Verdict
from ..timing import boot_clock
from . import stock
from .names import Names

logger = logging.getLogger("fastapi_singleton")

_DEFAULT_GRACE = 1  # APScheduler's default misfire_grace_time: nobody chose it


class NotRun(Enum):
    """Returned by a guarded call that did not call the user's function, so that no event claims it did."""

    REFUSED = "this worker no longer leads"
    TAKEN = "it has been run or accounted for"
    TOO_LATE = "it is older than it may be"
    FULL = "as many runs of it are alive as max_instances allows"
    NOT_YET = "it waits for room beside the job's other runs"


@dataclass(frozen=True, slots=True)
class Due:
    """A tick to be run, and why. `latest` is when it may start at the latest, where the job's own rule does not say."""

    tick: datetime
    attempt: int = 1
    cause: Cause = "schedule"
    latest: datetime | None = None


class Submission(Protocol):
    """Ticks of a job on their way through an executor."""

    key: str

    @property
    def waiting(self) -> Sequence[Due]:
        """The ticks that have no verdict yet."""


class Gate:
    """One worker's gate. It is shut, whatever the term, while `accepting` is false."""

    def __init__(
        self,
        name: str,
        scheduler: Any,
        names: Names,
        catch_up: float,
        trusted: Callable[[], Term | None],
        ledger: Ledger,
    ) -> None:
        self.accepting = False
        self.closing = False
        self.names = names
        self._name = name
        self._scheduler = scheduler
        self._catch_up = catch_up
        self._trusted = trusted
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._waiting: dict[str, int] = {}
        self._changing = threading.Lock()
        self._submissions: set[Submission] = set()

    @property
    def under_way(self) -> int:
        """How many submissions have calls yet to make."""
        return len(self._submissions)

    def without_verdict(self) -> set[tuple[str, datetime, int]]:
        """Jobs, ticks and attempts that wait for their slot or verdict, perhaps for long: they may have no row yet."""
        with self._changing:
            submissions = tuple(self._submissions)
        return {(each.key, due.tick, due.attempt) for each in submissions for due in each.waiting}

    def waiting(self, key: str) -> int:
        """How many submissions of the job wait for a slot or a verdict: whether they run at all is yet to be seen."""
        return self._waiting.get(key, 0)

    def submitted(self, key: str, submission: Submission) -> None:
        """A submission of the job is under way, and waits."""
        with self._changing:
            self._submissions.add(submission)
            self._waiting[key] = self._waiting.get(key, 0) + 1

    def done(self, key: str, submission: Submission) -> None:
        """It has made all its calls, or will make none."""
        with self._changing:
            self._submissions.discard(submission)
            self._count_waiting(key, -1)

    def begun(self, key: str) -> None:
        """One that waited has its call made."""
        with self._changing:
            self._count_waiting(key, -1)

    def ended(self, key: str) -> None:
        """The call has been made; further ones may follow."""
        with self._changing:
            self._count_waiting(key, 1)

    def _count_waiting(self, key: str, more: int) -> None:
        left = self._waiting.get(key, 0) + more
        if left:
            self._waiting[key] = left
        else:
            self._waiting.pop(key, None)

    async def admit(self, key: str, job: Any, due: Due) -> Entry | NotRun:
        """Claim the tick, or say why it must not run here and now."""
        term = self._trusted()
        if term is None or not self.accepting:
            return _not_run(job, due, NotRun.REFUSED)
        latest = due.latest or due.tick + timedelta(seconds=self.latest_start(job))
        entry = Entry(
            self._name, key, due.tick, due.attempt, due.cause, term.fence, latest=latest, limit=job.max_instances
        )
        verdict = await self._ledger.enter(entry)
        while verdict is Verdict.EARLY and self._trusted() == term and self.accepting:
            await asyncio.sleep(0.05)  # the trigger runs ahead of the store
            verdict = await self._ledger.enter(entry)
        if verdict is Verdict.YOURS and self._trusted() is None:
            # So much time has passed that the run may have been given up for dead meanwhile: ask once more.
            verdict = await self._ledger.enter(entry)
            if verdict is not Verdict.YOURS:
                self._ledger.end(Ending(entry, "abandoned", 0.0, UNBEGUN))
        if verdict not in (Verdict.LOST, Verdict.EARLY) and stock.is_shared_date(self._scheduler, job):
            stock.remove(self._scheduler, job.id, job._jobstore_alias)  # it is in the ledger now
        match verdict:
            case Verdict.YOURS:
                return entry
            case Verdict.WRITTEN:
                return _not_run(job, due, NotRun.TOO_LATE)
            case Verdict.TAKEN | Verdict.PRUNED:
                return _not_run(job, due, NotRun.TAKEN)
            case Verdict.FULL:
                return _not_run(job, due, NotRun.FULL if due.cause != "rerun" else NotRun.NOT_YET)
            case _:
                return _not_run(job, due, NotRun.REFUSED)

    def admit_from_thread(self, key: str, job: Any, due: Due) -> Entry | NotRun:
        """The same, from a thread that may wait."""
        if threading.get_ident() in (self._loop_thread, stock.thread_of(self._scheduler)):
            # The loop may be waiting for the scheduler, which holds its jobs while it looks.
            raise ConfigurationError(
                f"The executor {job.executor!r} runs jobs on the scheduler's own thread, where none can wait for its claim.",
                hint="use the default executor, a thread pool or a process pool.",
            )
        try:
            return asyncio.run_coroutine_threadsafe(self.admit(key, job, due), self._loop).result()
        except (CancelledError, RuntimeError):  # the loop is closing, or closed
            return NotRun.REFUSED

    def recorded(self, entry: Entry) -> "Recorded":
        """While the block lasts this is the current run; how it ends is written down."""
        return Recorded(self, entry)

    def end(self, ending: Ending) -> None:
        if threading.get_ident() == self._loop_thread:
            self._ledger.end(ending)
            return
        try:
            self._loop.call_soon_threadsafe(self._ledger.end, ending)
        except RuntimeError:
            logger.warning("A run of %s ended after its worker, and will be shown as abandoned", ending.entry.job)

    def on_loop(self, do: Callable[[], None]) -> None:
        """Do something on the event loop soon, from whatever thread, unless it is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(do)

    def remark(self, job: Any, ticks: Sequence[datetime], reason: str) -> None:
        """Write down ticks that are not run, and why."""
        term = self._trusted()
        if term is None or not ticks:
            return
        key = self.names.of(job)
        entries = [
            Entry(self._name, key, tick.astimezone(UTC), token=term.fence, outcome="skipped", error=reason)
            for tick in ticks
        ]
        self._loop.call_soon_threadsafe(self._ledger.remark, entries)

    def latest_start(self, job: Any) -> float:
        """How late a tick may start: `catch_up`, narrowed by a misfire_grace_time that the user has set."""
        catch_up = policy_of(job.func).catch_up
        catch_up = self._catch_up if catch_up is None else catch_up
        grace = job.misfire_grace_time
        return catch_up if grace in (None, _DEFAULT_GRACE) else min(catch_up, grace)


class Recorded:
    """A claimed run, from its beginning to its end."""

    __slots__ = ("_began", "_entry", "_gate", "_token")

    def __init__(self, gate: Gate, entry: Entry) -> None:
        self._gate = gate
        self._entry = entry

    def __enter__(self) -> Run:
        entry = self._entry
        self._gate.begun(entry.job)
        run = Run(entry.id, entry.job, entry.tick, entry.attempt, entry.token, entry.nonce)
        self._token: Token[Run | None] = enter_run(run)
        self._began = boot_clock()
        return run

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        seconds = boot_clock() - self._began
        leave_run(self._token)
        self._gate.ended(self._entry.job)
        if error is None:
            ending = Ending(self._entry, "succeeded", seconds)
        elif self._gate.closing and isinstance(error, asyncio.CancelledError):
            ending = Ending(self._entry, "abandoned", seconds, "cut short: its worker stopped before it ended")
        else:
            ending = Ending(self._entry, "failed", seconds, described(error))
        self._gate.end(ending)


def _not_run(job: Any, due: Due, why: NotRun) -> NotRun:
    level = logging.DEBUG if why in (NotRun.TAKEN, NotRun.NOT_YET) else logging.WARNING
    logger.log(level, "Job %s due at %s was not run: %s", job.id, due.tick, why.value, extra={"job": job.id})
    return why
