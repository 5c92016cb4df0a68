"""A race of several workers over every store: nobody leads, and each tick runs once all the same."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import STATE_RUNNING
from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.interval import IntervalTrigger

from fastapi_singleton import ConfigurationError, Run, Singleton, current_run
from fastapi_singleton.errors import StoreError
from fastapi_singleton.scheduling.succession import Succession

from ..conftest import eventually
from ..stores import RealStore

Start = Callable[..., Any]
runs: list[Run] = []


@pytest.fixture(autouse=True)
def _no_runs_yet() -> None:
    runs.clear()


def job() -> None:
    runs.append(current_run())


async def job_async() -> None:
    job()


def racing(kind: Any = AsyncIOScheduler, func: Any = job_async, trigger: Any = "interval", **options: Any) -> Any:
    scheduler = kind(timezone="UTC")
    scheduler.add_job(func, trigger, **{"id": "job", **options})
    return scheduler


@pytest.fixture
async def start(store: RealStore) -> AsyncIterator[Start]:
    """Starts workers of one fleet in this process, each with a scheduler of its own."""
    async with AsyncExitStack() as stack:

        async def enter(scheduler: Any, mode: str = "race", **options: Any) -> Singleton:
            singleton = Singleton(scheduler, store.url, mode=mode, **{"lease": 2.0, **options})
            await stack.enter_async_context(singleton.lifespan())
            return singleton

        yield enter


def each_once() -> bool:
    ticks = Counter(run.scheduled_for for run in runs)
    assert max(ticks.values(), default=1) == 1, ticks
    return len(ticks) >= 3


@pytest.mark.parametrize("kind", [AsyncIOScheduler, BackgroundScheduler])
async def test_every_worker_fires_and_each_tick_runs_once(start: Start, kind: Any) -> None:
    # Made at different moments: without a common phase the workers would not agree on a single tick.
    singletons = []
    for _ in range(3):
        singletons.append(await start(racing(kind, job if kind is BackgroundScheduler else job_async, seconds=1)))
        await asyncio.sleep(0.11)
    await eventually(each_once, "three ticks")
    ticks = sorted(run.scheduled_for for run in runs)
    assert [tick.microsecond for tick in ticks] == [0] * len(ticks)
    assert {after - before for before, after in pairwise(ticks)} == {timedelta(seconds=1)}
    assert {run.token for run in runs} == {None}
    assert not any(singleton.is_leader or singleton.term for singleton in singletons)

    async def seen() -> Any:
        status = await singletons[0].status()
        return status if len(status.workers) == 3 and status.jobs and status.runs else None

    status: Any = await eventually(seen, "the fleet")
    assert (status.status, status.mode, status.leader, status.problems) == ("ok", "race", None, ())
    assert {worker.role for worker in status.workers} == {"racer"}
    assert status.worst_case_failover_seconds == 0
    assert [shown.id for shown in status.jobs] == ["job"]


async def test_a_worker_that_leaves_is_not_missed(start: Start, store: RealStore) -> None:
    await start(racing(seconds=1))
    async with Singleton(racing(seconds=1), store.url, mode="race", lease=2.0).lifespan():
        await eventually(each_once, "three ticks")
    before = len(runs)
    await eventually(lambda: len(runs) >= before + 2, "further ticks")
    ticks = sorted(run.scheduled_for for run in runs)
    assert {after - before for before, after in pairwise(ticks)} == {timedelta(seconds=1)}


@pytest.mark.parametrize("idiom", [{}, {"trigger": "interval", "hours": 1, "next_run_time": "now"}])
async def test_what_is_to_run_at_once_runs_in_one_worker(start: Start, idiom: dict[str, Any]) -> None:
    singletons = []
    for _ in range(3):
        now = {"next_run_time": datetime.now(UTC)} if idiom else {}
        singletons.append(await start(racing(**{"trigger": "date", **idiom, **now})))
        await asyncio.sleep(0.05)

    async def all_settled() -> bool:
        status = await singletons[0].status()
        return len(status.workers) == 3 and bool(runs)

    await eventually(all_settled, "a run")
    marker = await start(racing(func=job, trigger="cron", second="*", id="marker"))
    await eventually(lambda: any(run.job == "marker" for run in runs), "a later tick")
    assert [run.job for run in runs].count("job") == 1
    assert marker


async def test_a_job_paused_in_one_worker_is_paused_and_resumed_in_all(start: Start) -> None:
    first, second = racing(seconds=1), racing(seconds=1)
    for scheduler in (first, second):
        await start(scheduler, lease=1.0)
    await eventually(lambda: runs, "a run")
    first.pause_job("job")
    await eventually(lambda: second.get_job("job").next_run_time is None, "the pause in the other worker")
    second.resume_job("job")
    await eventually(lambda: first.get_job("job").next_run_time is not None, "that it goes on here too")
    before = len(runs)
    await eventually(lambda: len(runs) > before, "a further run")
    first.remove_job("job")
    await eventually(lambda: second.get_job("job") is None, "the removal in the other worker")


@pytest.mark.parametrize("rescheduled", [False, True])
async def test_a_job_added_or_rescheduled_while_the_others_run_has_their_phase(start: Start, rescheduled: bool) -> None:
    schedulers = [racing(trigger="cron", hour=0), racing(trigger="cron", hour=0)]
    for scheduler in schedulers:
        await start(scheduler)
    await eventually(lambda: {scheduler.state for scheduler in schedulers} == {STATE_RUNNING}, "the start")
    for scheduler in schedulers:
        if rescheduled:
            scheduler.reschedule_job("job", trigger="interval", seconds=1)
        else:
            scheduler.add_job(job_async, "interval", seconds=1, id="late")
        await asyncio.sleep(0.11)
    await eventually(each_once, "three ticks")
    assert {run.scheduled_for.microsecond for run in runs} == {0}


async def test_a_job_that_begins_paused_has_the_common_phase_when_it_is_resumed(start: Start) -> None:
    schedulers = [racing(seconds=1, next_run_time=None), racing(seconds=1, next_run_time=None)]
    for scheduler in schedulers:
        await start(scheduler, lease=1.0)
        await asyncio.sleep(0.11)
    await eventually(lambda: {scheduler.state for scheduler in schedulers} == {STATE_RUNNING}, "the start")
    schedulers[0].resume_job("job")
    await eventually(lambda: schedulers[1].get_job("job").next_run_time, "the resumption in the other worker")
    await eventually(each_once, "three ticks")
    assert {run.scheduled_for.microsecond for run in runs} == {0}


async def test_a_job_added_with_a_jitter_is_refused_alone(start: Start) -> None:
    scheduler = racing(seconds=1)
    singleton = await start(scheduler)
    await eventually(lambda: runs, "a run")
    scheduler.add_job(job_async, "interval", seconds=1, jitter=1, id="shaky")
    assert scheduler.get_job("shaky").next_run_time is None
    assert any("jitter" in problem for problem in (await singleton.status()).problems)


async def test_a_date_that_each_worker_has_worked_out_for_itself_is_refused_and_shown(start: Start) -> None:
    scheduler = racing(seconds=1)
    scheduler.add_job(
        job_async, "date", run_date=datetime.now(UTC).replace(microsecond=7) + timedelta(hours=1), id="own"
    )
    singleton = await start(scheduler)
    await eventually(lambda: runs, "a run")
    assert scheduler.get_job("own") is None
    [problem] = (await singleton.status()).problems
    assert "own" in problem
    assert "Hint: " in problem


async def test_a_job_removed_in_one_worker_and_added_again_in_another_is_there_again(start: Start) -> None:
    first, second = racing(seconds=1), racing(seconds=1)
    for scheduler in (first, second):
        await start(scheduler, lease=1.0)
    await eventually(lambda: runs, "a run")
    first.remove_job("job")
    await eventually(lambda: second.get_job("job") is None, "the removal in the other worker")
    runs.clear()
    second.add_job(job_async, "interval", seconds=1, id="job")
    await eventually(lambda: len(runs) >= 3, "its runs")


async def test_one_off_jobs_from_one_function_in_several_workers_all_run(start: Start) -> None:
    schedulers = [racing(trigger="cron", hour=0), racing(trigger="cron", hour=0)]
    for scheduler in schedulers:
        await start(scheduler)
    await eventually(lambda: {scheduler.state for scheduler in schedulers} == {STATE_RUNNING}, "the start")
    sent: list[int] = []

    async def send(number: int) -> None:
        sent.append(number)
        await asyncio.sleep(0.2)

    for number, scheduler in enumerate(schedulers):
        scheduler.add_job(send, args=(number,))
    await eventually(lambda: sorted(sent) == [0, 1], "both")


async def test_a_part_that_could_not_be_taken_up_is_taken_up_when_the_store_is_well(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = iter([True])
    ask = Succession._known

    async def fail_once(self: Succession, *arguments: Any) -> Any:
        if next(fails, False):
            raise StoreError("A statement waited too long.", hint="none")
        return await ask(self, *arguments)

    monkeypatch.setattr(Succession, "_known", fail_once)
    await start(racing(seconds=1), lease=1.0)
    await eventually(lambda: runs, "a run")


async def test_max_instances_counts_the_runs_of_all_workers(start: Start) -> None:
    release, alive, most = asyncio.Event(), 0, 0

    async def long() -> None:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        await release.wait()
        alive -= 1

    singletons = [await start(racing(func=long, seconds=1)) for _ in range(3)]
    await eventually(lambda: alive, "a run")

    async def skipped() -> Any:
        rows = await singletons[0].runs("job")
        return len([row for row in rows if row.outcome == "skipped" and "max_instances=1" in str(row.error)]) >= 3

    await eventually(skipped, "three skipped ticks")
    assert most == 1
    release.set()


@pytest.mark.parametrize(("first", "second"), [("leader", "race"), ("race", "leader")])
async def test_two_modes_under_one_name_are_refused_until_one_of_them_is_gone(
    start: Start, store: RealStore, first: str, second: str
) -> None:
    async with Singleton(racing(seconds=1), store.url, mode=first, lease=1.0).lifespan():
        await eventually(lambda: runs, "a run")
        later = await start(racing(seconds=1), mode=second, lease=1.0)

        async def refused() -> Any:
            status = await later.status()
            return status if status.problems else None

        status: Any = await eventually(refused, "the refusal")
        assert status.status == "degraded"
        assert "another mode" in status.problems[0]
        assert status.backend.reachable
        assert not later.is_leader
    runs.clear()
    await eventually(lambda: runs, "that the other has its turn")
    await eventually(lambda: later._elector and later._elector.problem is None, "that it is well")


def test_what_cannot_be_raced_for_is_refused_at_construction() -> None:
    for scheduler, words in (
        (racing(seconds=1, jitter=3), "jitter"),
        (racing(trigger=OrTrigger([IntervalTrigger(seconds=1, jitter=1)])), "jitter"),
        (racing(trigger=OrTrigger([IntervalTrigger(seconds=1)])), "combines"),
        (racing(trigger="calendarinterval", days=2), "starts with this process"),
        (AsyncIOScheduler(jobstores={"default": SQLAlchemyJobStore("sqlite://")}), "job store"),
        (None, "needs a scheduler"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            Singleton(scheduler, "sqlite:///never.sqlite3", mode="race")
    with pytest.raises(ConfigurationError, match="unknown"):
        Singleton(racing(seconds=1), "sqlite:///never.sqlite3", mode="relay")


def test_a_leaders_task_is_refused() -> None:
    singleton = Singleton(racing(seconds=1), "sqlite:///never.sqlite3", mode="race")

    async def warm_up() -> None: ...

    with pytest.raises(ConfigurationError, match="needs a leader"):
        singleton.task(warm_up)


async def test_a_jitter_added_after_construction_is_refused_at_the_lifespan(tmp_path: Any) -> None:
    scheduler = racing(seconds=1)
    singleton = Singleton(scheduler, f"sqlite:///{tmp_path}/store.sqlite3", mode="race")
    scheduler.add_job(job, "interval", seconds=1, jitter=1, id="shaky")
    with pytest.raises(ConfigurationError, match="jitter"):
        async with singleton.lifespan():
            pass
