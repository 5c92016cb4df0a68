"""Which jobs are due: each tick is handed over once, in its order, however many are due together."""

import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from fastapi_singleton.scheduling.looking import Looking

BEGINNING = datetime(2026, 3, 1, 12, tzinfo=UTC)


def nothing() -> None: ...


class Bench:
    """A real scheduler that looks only when it is told to, by a clock that the test moves; what it hands over is kept."""

    def __init__(self) -> None:
        self.now = BEGINNING
        self.handed_over: dict[str, list[datetime]] = {}
        self.scheduler: Any = AsyncIOScheduler(timezone="UTC")
        self.scheduler._process_jobs = lambda: None
        self.scheduler._lookup_executor = lambda alias: self
        self.scheduler.start()
        self.look = Looking(self.scheduler, lambda: self.now, 10.0)

    def submit_job(self, job: Any, run_times: Sequence[datetime]) -> None:
        self.handed_over.setdefault(job.id, []).extend(run_times)

    def add(self, name: str, trigger: Any, **options: Any) -> Any:
        first = trigger.get_next_fire_time(None, self.now)
        return self.scheduler.add_job(nothing, trigger, id=name, next_run_time=first, **options)

    def look_until_nothing_is_due(self) -> int:
        for looks in range(1, 1000):
            if self.look() != 0:
                return looks
        raise AssertionError("There is always something due.")


@pytest.fixture
async def bench() -> Any:
    made = Bench()
    yield made
    made.scheduler.shutdown(wait=False)


def ticks(trigger: Any, since: datetime, until: datetime) -> Iterator[datetime]:
    tick = trigger.get_next_fire_time(None, since)
    while tick is not None and tick <= until:
        yield tick
        tick = trigger.get_next_fire_time(tick, until)


def some_trigger(n: int) -> Any:
    match n % 4:
        case 0:
            return CronTrigger(second="*", timezone="UTC")
        case 1:
            return CronTrigger(second="*/3", timezone="UTC")
        case 2:
            return IntervalTrigger(seconds=1 + n % 3, start_date=BEGINNING + timedelta(milliseconds=n), timezone="UTC")
        case _:
            return IntervalTrigger(seconds=0.2, start_date=BEGINNING, timezone="UTC")


@pytest.mark.parametrize("crowd", [3, 120, 700])
@pytest.mark.parametrize("seed", range(3))
async def test_each_tick_is_handed_over_once_and_in_order(bench: Bench, crowd: int, seed: int) -> None:
    chance = random.Random(seed)
    triggers = {f"job-{n}": some_trigger(n) for n in range(crowd)}
    for name, trigger in triggers.items():
        bench.add(name, trigger, coalesce=False)
    for _ in range(15):
        bench.now += timedelta(seconds=chance.choice((0.0, 0.01, 0.4, 1.0, 3.3)))
        for _ in range(chance.choice((0, 1, 4, 40))):  # often it is interrupted half-way
            bench.look()
    bench.look_until_nothing_is_due()
    for name, trigger in triggers.items():
        assert bench.handed_over.get(name, []) == [*ticks(trigger, BEGINNING, bench.now)], name
        assert bench.scheduler.get_job(name).next_run_time > bench.now


async def test_a_crowd_is_handed_over_before_any_of_it_is_moved_on(bench: Bench) -> None:
    for n in range(300):
        bench.add(f"job-{n}", CronTrigger(second="*", timezone="UTC"))
    bench.look()
    assert len(bench.handed_over) == 250
    bench.look()
    assert len(bench.handed_over) == 300
    assert all(job.next_run_time == BEGINNING for job in bench.scheduler.get_jobs())
    bench.look_until_nothing_is_due()
    assert {job.next_run_time for job in bench.scheduler.get_jobs()} == {BEGINNING + timedelta(seconds=1)}
    assert all(handed_over == [BEGINNING] for handed_over in bench.handed_over.values())


async def test_what_the_application_does_to_a_job_of_a_crowd_holds(bench: Bench) -> None:
    for n in range(100):
        bench.add(f"job-{n}", CronTrigger(second="*", timezone="UTC"))
    bench.look()  # all are handed over, none is moved on
    bench.scheduler.remove_job("job-0")
    bench.scheduler.pause_job("job-1")
    bench.scheduler.modify_job("job-2", next_run_time=BEGINNING - timedelta(seconds=1))
    bench.look_until_nothing_is_due()
    assert bench.scheduler.get_job("job-0") is None
    assert bench.scheduler.get_job("job-1").next_run_time is None
    assert bench.handed_over["job-2"][1:] == [BEGINNING]  # of the two that it names again, coalesced, the last
    bench.now += timedelta(seconds=1)
    bench.look_until_nothing_is_due()
    assert len(bench.handed_over["job-0"]) == len(bench.handed_over["job-1"]) == 1
    assert bench.handed_over["job-3"] == [BEGINNING, BEGINNING + timedelta(seconds=1)]


def failing(kind: Any) -> Any:
    class Failing(kind):  # type: ignore[misc]
        def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime | None:
            if previous is not None:
                raise RuntimeError("no")
            return super().get_next_fire_time(previous, now)  # type: ignore[no-any-return]

    return Failing


@pytest.mark.parametrize("good", [10, 100])
@pytest.mark.parametrize("bad", [1, 60])
@pytest.mark.parametrize(
    "trigger",
    [
        failing(CronTrigger)(second="*", timezone="UTC"),
        failing(IntervalTrigger)(seconds=1, start_date=BEGINNING, timezone="UTC"),
    ],
)
async def test_a_trigger_that_fails_holds_up_nobody_else_and_is_asked_later(
    bench: Bench, good: int, bad: int, trigger: Any
) -> None:
    for n in range(bad):
        bench.add(f"failing-{n}", trigger)
    for n in range(good):
        bench.add(f"job-{n}", CronTrigger(second="*", timezone="UTC"))
    asked_again = BEGINNING + timedelta(seconds=bench.scheduler.jobstore_retry_interval)
    while bench.now < asked_again + timedelta(seconds=5):
        wait = bench.look()
        assert wait is not None
        assert wait <= 1  # the others' next tick
        bench.now += timedelta(seconds=wait)
    for n in range(good):
        assert bench.handed_over[f"job-{n}"][:15] == [BEGINNING + timedelta(seconds=second) for second in range(15)]
    assert all(len(set(bench.handed_over.get(f"failing-{n}", []))) <= 1 for n in range(bad))


async def test_a_job_whose_trigger_fails_for_good_is_no_spin(bench: Bench) -> None:
    bench.add("failing", failing(IntervalTrigger)(seconds=1, start_date=BEGINNING, timezone="UTC"))
    assert bench.look() == bench.scheduler.jobstore_retry_interval
