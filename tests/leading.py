"""A worker that leads on a real store, without a server around it: for tests of what a leader does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi_singleton.backends import find_store
from fastapi_singleton.errors import StoreError
from fastapi_singleton.ledger import Ledger
from fastapi_singleton.records import RunView, Term, Worker
from fastapi_singleton.scheduling import SchedulerDuties
from fastapi_singleton.timing import Timing

from .conftest import eventually


class Leading:
    """One worker. `trusted` may be taken from it and given back; `steal` lets another worker lead meanwhile."""

    def __init__(self, url: str, name: str = "unit", lease: float = 30.0, process: str | None = None) -> None:
        self.name, self.timing = name, Timing(lease)
        self.worker = Worker.here()
        if process is not None:  # as if it were that one
            self.worker = replace(self.worker, process=process)
        self.store = find_store(url, None)
        self.backend: Any = self.store.open(name, self.worker, self.timing)
        self.ledger = Ledger(self.backend, self.timing)
        self.trusted: Term | None = None
        self._writing = asyncio.create_task(self.ledger.run())
        self._opened: list[SchedulerDuties] = []

    async def elect(self) -> Term:
        term = await eventually(self.backend.acquire, "an election")
        assert isinstance(term, Term)
        self.trusted = term
        return term

    def take_from(self, other: "Leading") -> Callable[[], Awaitable[Term]]:
        """What makes this worker lead in the other's place while the other still believes in its term."""

        async def take() -> Term:
            assert other.trusted is not None
            other.backend.forfeit()
            return await self.elect()

        return take

    async def resign(self) -> None:
        assert self.trusted is not None
        term, self.trusted = self.trusted, None
        await self.backend.release(term)

    def open(self, scheduler: Any, catch_up: float = 600.0, keep_runs: float = 86_400.0) -> SchedulerDuties:
        duties = SchedulerDuties(scheduler, catch_up, keep_runs)
        self.reopen(duties)
        return duties

    def reopen(self, duties: SchedulerDuties, **options: Callable[[], bool]) -> None:
        duties.open(self.name, self.timing.lease, lambda: self.trusted, self.backend, self.ledger, **options)
        self._opened.append(duties)

    def lose_the_next_reply(
        self, *, executed: bool = True, meanwhile: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """The next claim is (or is not) executed, but its reply never comes, and the connection is gone."""
        backend, enter = self.backend, self.backend.enter

        async def lose_it(*arguments: Any) -> Any:
            backend.enter = enter
            if executed:
                await enter(*arguments)
            backend.forfeit()
            if meanwhile is not None:
                await meanwhile()
            raise StoreError("The reply was lost.", hint="none")

        backend.enter = lose_it

    async def lead(self, scheduler: Any, **options: float) -> SchedulerDuties:
        """Open the duties and take them up; returns once the scheduler has caught up and runs."""
        duties = self.open(scheduler, **options)
        await self.take_up(duties)
        return duties

    async def take_up(self, duties: SchedulerDuties) -> None:
        if self.trusted is None:
            await self.elect()
        assert self.trusted is not None
        await duties.take_up(self.trusted)
        await self.settled(duties)

    async def settled(self, duties: SchedulerDuties) -> None:
        """Until what the succession has under way is done; raises what went wrong in it."""
        for task in list(duties._succession._tasks):
            await task

    async def go_on(self, duties: SchedulerDuties) -> None:
        """What a renewal sets going, to its end."""
        duties.renewed()
        await self.settled(duties)

    async def runs(self, job: str, *outcomes: str) -> Sequence[RunView]:
        """The job's rows, the oldest first."""
        await self.ledger.flush(30)
        rows: list[RunView] = await self.backend.runs(job, 500)
        return [row for row in reversed(rows) if not outcomes or row.outcome in outcomes]

    async def die(self) -> None:
        """As if the process had been killed: nothing is handed over or written down."""
        self.trusted = None
        self._writing.cancel()
        self.backend.forfeit()
        for duties in self._opened:
            duties.lay_down()

    async def close(self) -> None:
        for duties in self._opened:
            duties.lay_down()
            await duties.close()
        self._writing.cancel()
        self.ledger.close()
        await self.backend.close()


@asynccontextmanager
async def leading(url: str, **options: Any) -> AsyncIterator[Leading]:
    worker = Leading(url, **options)
    try:
        yield worker
    finally:
        await worker.close()
