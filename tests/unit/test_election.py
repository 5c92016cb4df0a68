"""The trust window, with the clock held in the hand and a real PostgreSQL behind it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fastapi_singleton.backends import Backend
from fastapi_singleton.backends.postgres import PostgresStore
from fastapi_singleton.election import Duties, Elector
from fastapi_singleton.records import Term, Worker
from fastapi_singleton.timing import Timing

from ..conftest import eventually

TIMING = Timing(lease=20.0)


class Clock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A real backend; `before_reply` happens between the store's answer and its reaching the elector."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.renewals = 0
        self.go = asyncio.Event()
        self.before_reply: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    async def renew(self, *arguments: Any) -> bool:
        kept: bool = await self.backend.renew(*arguments)
        self.before_reply()
        self.renewals += 1
        return kept

    async def vacancy(self, timeout: float) -> None:
        """The test says when the next renewal is due."""
        await self.go.wait()
        self.go.clear()


@asynccontextmanager
async def leading(url: str, duties: Duties | None = None) -> AsyncIterator[tuple[Elector, Watched, Clock]]:
    clock = Clock()
    backend = Watched(PostgresStore.parse(url).open("unit", Worker.here(), TIMING))
    elector = Elector(backend, TIMING, duties or Duties(), clock=clock)
    task = asyncio.create_task(elector.run())
    await eventually(lambda: elector.term and backend.renewals, "first renewal")
    try:
        yield elector, backend, clock
    finally:
        elector.retire()
        backend.go.set()
        await task
        await backend.close()


async def renew(backend: Watched) -> None:
    before = backend.renewals
    backend.go.set()
    await eventually(lambda: backend.renewals > before, "a renewal")
    await asyncio.sleep(0)


def test_the_chain_of_durations_keeps_two_leaders_apart() -> None:
    for lease in (0.2, 1.0, 10.0, 3600.0):
        timing = Timing(lease)
        assert timing.renew_every + timing.request_timeout < timing.trust < lease
        assert timing.worst_case_failover > lease
        assert timing.poll <= 1.0


async def test_trust_lapses_before_the_servers_lease(database: str) -> None:
    async with leading(database) as (elector, _, clock):
        clock.now += TIMING.trust - 0.01
        assert elector.term is not None
        clock.now += 0.01
        assert clock.now < 1000.0 + TIMING.lease
        assert elector.term is None


async def test_a_slow_good_renewal_extends_trust_only_from_when_it_was_sent(database: str) -> None:
    async with leading(database) as (elector, backend, clock):
        clock.now += 5.0
        sent = clock.now

        def slow() -> None:
            clock.now += 4.0

        backend.before_reply = slow
        await renew(backend)
        assert elector.term is not None
        clock.now = sent + TIMING.trust - 0.01
        assert elector.term is not None
        clock.now = sent + TIMING.trust
        assert elector.term is None


async def test_a_paused_process_is_not_leader_on_waking_and_never_renews_back(database: str) -> None:
    async with leading(database) as (elector, backend, clock):
        old = elector.term
        assert old is not None
        clock.now += TIMING.lease
        assert elector.term is None
        renewals = backend.renewals
        backend.go.set()
        new = await eventually(lambda: elector.term, "a new term")
        assert isinstance(new, Term)
        assert new.token > old.token
        assert not await backend.backend.renew(old)
        await eventually(lambda: backend.renewals > renewals, "the new term's renewal")


async def test_an_answer_that_comes_after_trust_has_lapsed_ends_the_term(database: str) -> None:
    async with leading(database) as (elector, backend, clock):
        old = elector.term
        assert old is not None
        clock.now += TIMING.trust - 0.01  # sent in time …

        def late() -> None:
            clock.now += 0.02  # … answered too late, although the new deadline would lie ahead

        backend.before_reply = late
        backend.go.set()
        await eventually(lambda: elector.term and elector.term.token > old.token, "a new term instead of the old one")


async def test_a_worker_that_cannot_start_its_scheduler_resigns_instead_of_leading_idle(database: str) -> None:
    class Broken(Duties):
        laid_down = 0

        async def take_up(self, term: Term) -> None:
            raise RuntimeError("no such job store")

        def lay_down(self) -> None:
            self.laid_down += 1

    timing = Timing(1.0)
    duties = Broken()
    backends: list[Backend] = [PostgresStore.parse(database).open("unit", Worker.here(), timing) for _ in range(2)]
    broken = Elector(backends[0], timing, duties)
    tasks = [asyncio.create_task(broken.run())]
    await eventually(lambda: broken.problem, "a resignation")
    assert "RuntimeError" in str(broken.problem)
    assert broken.term is None
    assert duties.laid_down
    sound = Elector(backends[1], timing, Duties())
    tasks.append(asyncio.create_task(sound.run()))
    await eventually(lambda: sound.term, "the sound worker's election")
    for elector in (broken, sound):
        elector.retire()
    await asyncio.gather(*tasks)
    for backend in backends:
        await backend.close()


async def test_a_stopping_leader_goes_on_renewing_until_it_retires(database: str) -> None:
    async with leading(database) as (elector, backend, _):
        elector.stop_contending()
        await renew(backend)
        await renew(backend)
        assert elector.term is not None


@pytest.mark.parametrize("failures", [1, 5, 50, 5000])
def test_backoff_is_bounded_by_the_poll_interval(failures: int) -> None:
    assert 0 < TIMING.backoff(failures) <= TIMING.poll
