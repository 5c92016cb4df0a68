"""Singleton: the façade, and the only place where the parts are put together."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from .backends import Backend, find_store
from .election import Elector, SeveralDuties
from .errors import ConfigurationError, StoreError
from .jobs import current_run
from .ledger import Ledger
from .locks import Lock, check_wait, hold, lock_name
from .once import run_once
from .racing import Racer
from .reading import Reader
from .records import LOCK_PREFIX, BackendView, Fleet, RunView, Status, Term, Worker, is_name
from .scheduling import SchedulerDuties
from .tasks import TaskDuties, TaskFunction
from .timing import Timing, boot_clock

if TYPE_CHECKING:
    from fastapi import APIRouter

logger = logging.getLogger("fastapi_singleton")

URL_VARIABLE = "FASTAPI_SINGLETON_URL"
_DAY = 86_400.0
_LONGEST = 36_500 * _DAY
_LAST_REQUEST = 5.0  # what a stopping worker waits for a store that does not answer, at each step


class Singleton:
    """One leader among all workers that share a store and a `name`; the scheduler runs there and nowhere else. With
    `mode="race"` it runs in every worker, and each tick in the one that claims it first.

    Constructing it checks the configuration and connects nowhere. The lifespan does the rest, and never raises because
    the store is away.
    """

    def __init__(
        self,
        scheduler: Any = None,
        url: str | None = None,
        *,
        name: str = "default",
        mode: str = "leader",
        lease: float = 10.0,
        catch_up: float = 600.0,
        drain: float = 10.0,
        keep_runs: float = 30 * _DAY,
        connect: Callable[[], Awaitable[Any]] | None = None,
        enabled: bool = True,
    ) -> None:
        if not is_name(name) or name.startswith(LOCK_PREFIX):
            raise ConfigurationError(
                f"name={name!r} cannot name a fleet.", hint="use a short text, the same in every worker, such as 'app'."
            )
        if mode not in ("leader", "race"):
            raise ConfigurationError(f"mode={mode!r} is unknown.", hint="use mode='leader' or mode='race'.")
        for label, seconds in (("catch_up", catch_up), ("drain", drain), ("keep_runs", keep_runs)):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST:
                raise ConfigurationError(
                    f"{label}={seconds!r} is not a duration.", hint="pass seconds: 0 or more, a century at most."
                )
        if keep_runs < 2 * catch_up:
            raise ConfigurationError(
                f"keep_runs={keep_runs!r} is shorter than twice catch_up={catch_up!r}.",
                hint="keep runs for longer than ticks are caught up on, or they could not be told from missing ones.",
            )
        if not isinstance(enabled, bool):
            raise ConfigurationError(
                f"enabled={enabled!r} is neither True nor False.",
                hint='from the environment: enabled=os.environ.get("SCHEDULER") != "off".',
            )
        self._timing = Timing(lease)
        self._name = name
        self._mode = mode
        self._drain = drain
        self._keep_runs = float(keep_runs)
        self._enabled = enabled
        if connect is None:
            url = url or os.environ.get(URL_VARIABLE) or None
        self._by_default = url is None and connect is None
        self._store = find_store(url, connect)
        self._racing = mode == "race"
        if self._racing and scheduler is None:
            raise ConfigurationError("mode='race' needs a scheduler.", hint="pass one, or use mode='leader' to elect.")
        self._duties = (
            SchedulerDuties(scheduler, catch_up, keep_runs, racing=self._racing) if scheduler is not None else None
        )
        self._tasks = TaskDuties()
        self._said_disjoint = False
        self._worker: Worker | None = None
        self._backend: Backend | None = None
        self._elector: Elector | None = None
        self._ledger: Ledger | None = None

    def __repr__(self) -> str:
        return f"<Singleton {self._name!r} on {self._store.detail}>"

    @property
    def term(self) -> Term | None:
        """This worker's term, now; None as soon as it may no longer trust in it, and always in a race. Safe to read from
        any thread."""
        return self._elector.term if self._elector is not None and not self._racing else None

    @property
    def is_leader(self) -> bool:
        """Whether this worker leads, now."""
        return self.term is not None

    @asynccontextmanager
    async def lifespan(self, app: Any = None) -> AsyncIterator[None]:
        """Contend for the leadership while the application runs: `FastAPI(lifespan=singleton.lifespan)`, or
        `async with singleton.lifespan(app): yield` inside a lifespan of your own."""
        if self._worker is not None:
            raise ConfigurationError(
                "This singleton's lifespan is already open in this process.",
                hint="enter it once: pass it to FastAPI(lifespan=...) or use it inside your own lifespan, not both.",
            )
        if self._by_default:
            logger.warning(
                "No store is named, so %s is used, which serves the workers of one host. For several hosts pass a "
                "postgresql:// or redis:// URL, or set %s",
                self._store.detail,
                URL_VARIABLE,
            )
        # Made here, not at import: preloaded workers share what was made before they were forked.
        version = self._duties.version if self._duties is not None else ""
        worker = Worker.here(version, "racer" if self._racing else "standby")
        if not self._enabled:
            logger.info("fastapi_singleton is disabled: no election, and the scheduler is not started")
            self._worker = worker
            try:
                yield
            finally:
                self._worker = None
            return
        backend = self._store.open(self._name, worker, self._timing)
        duties = [self._duties] if self._duties is not None else []
        all_duties = SeveralDuties(*duties, self._tasks)
        if self._racing:
            part = Term.race(self._name, worker.worker)
            elector: Elector = Racer(backend, self._timing, all_duties, term=part)
        else:
            elector = Elector(backend, self._timing, all_duties)
        ledger = Ledger(backend, self._timing)
        if self._duties is not None:
            self._duties.open(
                self._name, self._timing.lease, lambda: elector.term, backend, ledger, lambda: elector.is_steady
            )
        self._worker, self._backend, self._elector, self._ledger = worker, backend, elector, ledger
        self._reader = Reader(backend, self._store.detail, self._timing, lambda: elector.is_away)
        # Tasks that the lifespan merely holds: a task group across `yield` would tear the application's resources down
        # while the server still answers.
        election = asyncio.create_task(elector.run(), name=f"fastapi_singleton:{self._name}:election")
        writing = asyncio.create_task(ledger.run(), name=f"fastapi_singleton:{self._name}:ledger")
        try:
            yield
        finally:
            try:
                await self._stop(elector, election, ledger)
            finally:
                self._worker = self._backend = self._elector = self._ledger = None
                await self._let_go(backend, ledger, election, writing)

    async def _stop(self, elector: Elector, election: "asyncio.Task[None]", ledger: Ledger) -> None:
        """Stop contending → pause → wait for running jobs, still renewing → write down how they ended → release and
        notify. Bounded throughout."""
        elector.stop_contending()
        self._tasks.lay_down()
        if self._duties is not None:
            self._duties.lay_down()
            left = await self._duties.drain(self._drain)
            if left:
                logger.warning("%d job(s) still run after the %g s allowed for draining", left, self._drain)
            await self._duties.close()
            if unwritten := await ledger.flush(min(2 * self._timing.request_timeout, _LAST_REQUEST)):
                logger.warning("The store did not take the endings of %d run(s)", unwritten)
        await self._tasks.close(self._drain)
        elector.retire()
        # Each step of the loop is bounded by the request timeout; this only guards against the unforeseen.
        await asyncio.wait([election], timeout=min(4 * self._timing.request_timeout + 1, _LAST_REQUEST))

    async def _let_go(self, backend: Backend, ledger: Ledger, *tasks: "asyncio.Task[None]") -> None:
        """Whatever came before, even a second interruption: no task, connection or running scheduler is left."""
        for task in tasks:
            task.cancel()
        ledger.close()
        try:
            async with asyncio.timeout(_LAST_REQUEST):
                await asyncio.gather(*tasks, return_exceptions=True)
                ledger.close()  # what was on its way is not waited for either
                await backend.close()
        except TimeoutError:
            pass
        finally:
            ledger.close()
            backend.forfeit()
            if self._duties is not None:
                await self._duties.close()

    async def status(self) -> Status:
        """The fleet as this worker last saw it. Asks nobody: it answers at once, also while the store is away."""
        elector = self._elector
        fleet = self._backend.fleet if self._backend is not None else Fleet()
        leader = fleet.leader
        # A leader nobody has confirmed for a whole lease is a memory, not a leader.
        if elector is None or elector.seen_at is None or boot_clock() - elector.seen_at > self._timing.lease:
            leader = None
        elif leader is not None and self._worker is not None and leader.worker == self._worker.worker:
            leader = leader if self.is_leader else None
        problems = tuple(self._problems())
        return Status(
            status="degraded" if problems else "ok" if leader is not None or self._racing else "no_leader",
            problems=problems,
            answered_by=self._worker.worker if self._worker is not None else "",
            name=self._name,
            mode=self._mode,
            backend=BackendView(self._store.kind, elector is not None and elector.reachable, self._store.detail),
            lease_seconds=self._timing.lease,
            worst_case_failover_seconds=0.0 if self._racing else self._timing.worst_case_failover,
            leader=leader,
            workers=tuple(
                replace(worker, role="standby") if worker.role == "leader" and leader is None else worker
                for worker in fleet.workers
            ),
            versions=fleet.versions,
            jobs=fleet.jobs,
            runs=fleet.runs,
        )

    def _problems(self) -> list[str]:
        if not self._enabled:
            return ["This worker is disabled (enabled=False): it neither leads nor runs jobs."]
        if self._elector is None:
            return ["The lifespan is not open: pass singleton.lifespan to FastAPI(lifespan=...)."]
        told = self._elector.problem, self._ledger.problem if self._ledger is not None else None
        problems = [problem for problem in dict.fromkeys(told) if problem is not None]
        if self._duties is not None:
            problems += self._duties.problems
        problems += self._tasks.problems
        if self._is_disjoint():
            problem = (
                f"This worker has none of the jobs that the leader of {self._name!r} runs, so its own never run. "
                "Hint: two services that share a database need two names: Singleton(..., name=...)."
            )
            problems.append(problem)
            if not self._said_disjoint:
                self._said_disjoint = True
                logger.error("%s", problem)
        return problems

    def _is_disjoint(self) -> bool:
        """Whether the fleet's leader is of another service: it runs jobs, and none of this worker's."""
        if self._duties is None or self._backend is None or self.is_leader or self._racing:
            return False
        led = {job.id for job in self._backend.fleet.jobs}
        return bool(led and self._duties.names and led.isdisjoint(self._duties.names))

    async def runs(self, job: str, *, limit: int = 50, before: datetime | None = None) -> list[RunView]:
        """A job's runs, the newest first, from before that scheduled time on. Asks the store: `StoreError` if it is away."""
        if self._backend is None:
            if not self._enabled:
                raise StoreError(
                    "This worker is disabled (enabled=False): it asks no store.", hint="ask another worker."
                )
            raise StoreError("The lifespan is not open.", hint="ask while the application runs.")
        return await self._reader.runs(job, limit, before)

    def task(self, func: TaskFunction) -> TaskFunction:
        """`@singleton.task` on a coroutine function: it runs in the worker that leads and nowhere else, is cancelled when
        the leadership ends, and is started again, with growing pauses, when it fails."""
        if self._racing:
            raise ConfigurationError(
                "@singleton.task needs a leader, and mode='race' has none.",
                hint="use mode='leader', or a second Singleton with a name of its own.",
            )
        self._tasks.add(func)
        return func

    def lock(self, name: str, *, wait: float = 0.0) -> AbstractAsyncContextManager[Lock]:
        """`async with singleton.lock("reports") as lock:` holds a lock in the whole fleet, renewed while the block lasts.
        Raises `LockHeldError` if somebody else has it for longer than `wait` seconds. Works outside the lifespan too."""
        if not is_name(name):
            raise ConfigurationError(f"name={name!r} cannot name a lock.", hint="use a short text such as 'reports'.")
        check_wait(wait)
        return hold(self._store, lock_name(self._name, "lock", name), self._timing, wait)

    async def once(self, key: str, func: Callable[[], Any]) -> bool:
        """Run the coroutine function (or a short plain one, on the event loop) at most once in the fleet for that key, for as
        long as the ledger is kept. True if this call ran it; a failure is recorded and raised, and nobody tries again."""
        if not is_name(key):
            raise ConfigurationError(f"key={key!r} cannot be a key.", hint="use a short text such as 'import-2026'.")
        if not callable(func):
            raise ConfigurationError(f"{func!r} cannot be called.", hint="pass a function, without calling it.")
        return await run_once(self._store, self._name, key, self._timing, self._keep_runs, func)

    async def fence(self, connection: Any) -> None:
        """Inside a job, in your own asyncpg transaction: raise `LostLeadershipError` unless this run is still the one that
        may write. Until the transaction ends nobody can give the run up for dead."""
        await self._store.fence(connection, self._name, current_run())

    def router(
        self, *, prefix: str = "/scheduler", dependencies: Sequence[Any] = (), actions: bool = False
    ) -> "APIRouter":
        """Routes that show this singleton: `GET {prefix}/status` and `GET {prefix}/jobs/{id}/runs`. Guard them with
        `dependencies`, as any router."""
        from .web.router import make_router

        if prefix and (not prefix.startswith("/") or prefix.endswith("/")):
            raise ConfigurationError(
                f"prefix={prefix!r} is not a path.", hint='it begins with a "/" and ends without one.'
            )
        if actions:
            raise ConfigurationError("The router has no actions.", hint="leave out actions=True.")
        return make_router(self.status, self.runs, prefix=prefix, dependencies=dependencies)
