"""Unmodified APScheduler 3 behind the guard: real schedulers, executors and job stores."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MISSED
from apscheduler.executors.pool import ProcessPoolExecutor, ThreadPoolExecutor
from apscheduler.job import Job
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

from fastapi_singleton.scheduling import SchedulerDuties, job_key

from ..conftest import eventually
from ..leading import Leading, leading

SOON = timedelta(seconds=0.05)
ran: list[object] = []


@pytest.fixture(autouse=True)
def _nothing_ran_yet() -> None:
    ran.clear()


async def coroutine_job() -> None:
    ran.append("coroutine")


def thread_job() -> None:
    ran.append(threading.current_thread().name)


def child_job(path: str) -> None:
    Path(path).write_text(str(os.getpid()))


def dying_child_job() -> None:
    os._exit(9)


def soon() -> datetime:
    return datetime.now(UTC) + SOON


def paused_scheduler(url: str) -> Any:
    """A plain scheduler that looks at a shared store and runs nothing, not even while it is shut down."""
    scheduler = BackgroundScheduler(timezone="UTC", jobstores={"default": SQLAlchemyJobStore(url)})
    scheduler._process_jobs = lambda: None
    scheduler.start()
    return scheduler


@pytest.fixture
async def leader(database: str) -> AsyncIterator[Leading]:
    async with leading(database) as worker:
        await worker.elect()
        yield worker


@contextmanager
def events(scheduler: Any, mask: int) -> Iterator[list[Any]]:
    seen: list[Any] = []
    scheduler.add_listener(seen.append, mask)
    yield seen


def test_the_private_names_of_apscheduler_are_still_there() -> None:
    scheduler = AsyncIOScheduler()
    for name in ("_lookup_executor", "_dispatch_event", "_real_add_job", "_process_jobs"):
        assert callable(getattr(scheduler, name))
    assert scheduler._pending_jobs == []
    assert scheduler._executors == scheduler._jobstores == {}
    assert hasattr(scheduler, "_jobstores_lock")
    assert hasattr(BackgroundScheduler, "_thread")
    assert callable(Job._modify)
    assert hasattr(ThreadPoolExecutor(1), "_pool")
    assert hasattr(SQLAlchemyJobStore, "_reconstitute_job")
    assert {"func", "func_ref", "next_run_time", "_jobstore_alias"} < set(Job.__slots__)


@pytest.mark.parametrize("kind", [AsyncIOScheduler, BackgroundScheduler])
async def test_jobs_run_under_a_trusted_term(kind: Any, leader: Leading) -> None:
    scheduler = kind(timezone="UTC")
    scheduler.add_job(thread_job, "date", run_date=soon(), id="thread")
    if kind is AsyncIOScheduler:
        scheduler.add_job(coroutine_job, "date", run_date=soon(), id="coroutine")
    duties = leader.open(scheduler)
    assert not scheduler.running
    await leader.take_up(duties)
    await eventually(lambda: len(ran) == (2 if kind is AsyncIOScheduler else 1), "the jobs' runs")
    await duties.close()
    assert not scheduler.running


@pytest.mark.parametrize("kind", [AsyncIOScheduler, BackgroundScheduler])
async def test_nothing_runs_once_trust_has_lapsed_and_no_event_says_it_did(kind: Any, leader: Leading) -> None:
    scheduler = kind(timezone="UTC")
    scheduler.add_job(thread_job, "interval", seconds=0.05, id="thread")
    duties = await leader.lead(scheduler)
    await eventually(lambda: ran, "a run under trust")
    leader.trusted = None
    assert await duties.drain(5) == 0
    ran.clear()
    with events(scheduler, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR | EVENT_JOB_MISSED) as seen:
        before = scheduler.get_job("thread").next_run_time
        await eventually(lambda: scheduler.get_job("thread").next_run_time > before + 3 * SOON, "some refused ticks")
        assert await duties.drain(5) == 0
    assert ran == []
    assert seen == []
    await duties.close()


async def test_a_tick_may_be_late_by_catch_up_and_no_more(leader: Leading) -> None:
    scheduler = AsyncIOScheduler(timezone="UTC")
    late = datetime.now(UTC) - timedelta(seconds=30)
    for name, grace in (("default", 1), ("unlimited", None), ("narrow", 5)):
        scheduler.add_job(ran.append, args=(name,), trigger="date", run_date=late, id=name, misfire_grace_time=grace)
    with events(scheduler, EVENT_JOB_MISSED) as missed:
        await leader.lead(scheduler)
        await eventually(lambda: len(ran) == 2 and len(missed) == 1, "two late runs and one missed")
    assert sorted(map(str, ran)) == ["default", "unlimited"]
    assert missed[0].job_id == "narrow"
    [row] = await leader.runs("narrow")
    assert row.outcome == "missed"
    assert row.error is not None
    assert "after its time" in row.error


async def test_the_drain_waits_for_coroutines_and_threads_and_is_bounded(leader: Leading) -> None:
    release, started = threading.Event(), threading.Event()

    def slow_thread() -> None:
        started.set()
        release.wait(30)
        ran.append("thread")

    async def slow_coroutine() -> None:
        await asyncio.to_thread(release.wait, 30)
        ran.append("coroutine")

    scheduler = AsyncIOScheduler(timezone="UTC")
    scheduler.add_job(slow_thread, "date", run_date=soon(), id="thread")
    scheduler.add_job(slow_coroutine, "date", run_date=soon(), id="coroutine")
    duties = await leader.lead(scheduler)
    await eventually(started.is_set, "the thread's start")
    await eventually(lambda: duties._gate.under_way == 2, "both under way")
    duties.lay_down()
    assert await duties.drain(0.05) == 2
    release.set()
    assert await duties.drain(30) == 0
    assert sorted(map(str, ran)) == ["coroutine", "thread"]
    await duties.close()


async def test_a_process_pool_runs_jobs_survives_a_dead_child_and_says_so(leader: Leading, tmp_path: Path) -> None:
    scheduler = BackgroundScheduler(timezone="UTC", executors={"default": ProcessPoolExecutor(1)})
    scheduler.add_job(dying_child_job, "date", run_date=soon(), id="dying")
    duties = leader.open(scheduler)
    with events(scheduler, EVENT_JOB_ERROR) as failed:
        await leader.take_up(duties)
        await eventually(lambda: failed, "the dead child's event")
    assert await duties.drain(30) == 0
    out = tmp_path / "pid"
    scheduler.add_job(child_job, args=(str(out),), id="child")
    await eventually(lambda: out.exists() and out.read_text(), "the next job in a new child")
    assert int(out.read_text()) != os.getpid()
    scheduler._executors["default"]._pool.shutdown(wait=True)
    await duties.close()


@pytest.mark.parametrize("pool", [False, True])
async def test_an_application_can_be_started_again_with_the_same_scheduler(pool: bool, leader: Leading) -> None:
    executors = {"default": ThreadPoolExecutor(2)} if pool else {}
    scheduler = BackgroundScheduler(timezone="UTC", executors=executors)
    scheduler.add_job(thread_job, "interval", seconds=0.05, id="thread")
    duties = SchedulerDuties(scheduler, 600, 86_400)
    for _ in range(3):
        ran.clear()
        leader.reopen(duties)
        await leader.take_up(duties)
        await eventually(lambda: ran, "a run")
        await duties.close()
        assert [job.id for job in scheduler.get_jobs()] == ["thread"]


async def test_jobs_added_inside_the_applications_own_lifespan_are_not_doubled_by_a_second_start(
    leader: Leading,
) -> None:
    scheduler = AsyncIOScheduler(timezone="UTC")
    duties = SchedulerDuties(scheduler, 600, 86_400)
    for _ in range(2):
        scheduler.add_job(coroutine_job, "interval", hours=1)
        leader.reopen(duties)
        await leader.take_up(duties)
        assert len(scheduler.get_jobs()) == 1
        await duties.close()


async def test_a_failed_start_can_be_tried_again(leader: Leading) -> None:
    scheduler = AsyncIOScheduler(timezone="UTC")
    scheduler.add_job(coroutine_job, "date", run_date=soon(), id="good")
    scheduler.add_job(coroutine_job, "interval", hours=1, id="bad", jobstore="nowhere")
    duties = leader.open(scheduler)
    for _ in range(2):
        with pytest.raises(KeyError):
            await leader.take_up(duties)
    scheduler.add_jobstore("memory", "nowhere")
    await leader.take_up(duties)
    await eventually(lambda: ran == ["coroutine"], "the good job")
    await duties.close()


async def test_a_shared_store_keeps_jobs_of_other_versions_and_unknown_executors(
    leader: Leading, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/jobs.sqlite"
    due = datetime.now(UTC) - timedelta(seconds=1)
    writer = paused_scheduler(url)
    trigger: dict[str, Any] = {"trigger": "interval", "hours": 1, "next_run_time": due}
    writer.add_job(thread_job, id="gone", **trigger)
    writer.add_job(thread_job, id="elsewhere", executor="gpu", **trigger)
    writer.add_job(thread_job, id="here", **trigger)
    writer.shutdown()
    # What the other version called is not in this one.
    original = globals().pop("thread_job")
    try:
        scheduler = BackgroundScheduler(timezone="UTC", jobstores={"default": SQLAlchemyJobStore(url)})
        scheduler.add_job(coroutine_job, "interval", hours=1, id="here")  # stored already, and not to be replaced
        duties = await leader.lead(scheduler)
        await eventually(
            lambda: all(job.next_run_time > datetime.now(UTC) for job in scheduler.get_jobs()), "the due jobs' turn"
        )
        assert {job.id for job in scheduler.get_jobs()} == {"gone", "elsewhere", "here"}
        await duties.close()
    finally:
        globals()["thread_job"] = original
    assert ran == []
    reader = paused_scheduler(url)
    assert {job.id: job.func for job in reader.get_jobs()} == dict.fromkeys(["gone", "elsewhere", "here"], original)
    reader.shutdown()


def test_a_job_without_an_id_is_known_by_its_function() -> None:
    scheduler = AsyncIOScheduler()
    assert job_key(scheduler.add_job(thread_job, "interval", hours=1)) == f"{__name__}:thread_job"
    assert job_key(scheduler.add_job(thread_job, "interval", hours=1, id="mine")) == "mine"
