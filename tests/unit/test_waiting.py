"""Jobs that wait for a slot or for their claim: whom they must not hold up, and what becomes of them."""

import asyncio
import os
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_ERROR
from apscheduler.executors.debug import DebugExecutor
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

from fastapi_singleton import Singleton
from fastapi_singleton.errors import ConfigurationError

from ..conftest import eventually
from ..leading import Leading, leading
from .test_scheduling import _nothing_ran_yet, events, leader, ran, soon, thread_job

__all__ = ["_nothing_ran_yet", "leader"]


async def test_jobs_that_wait_for_their_claims_leave_the_loops_threads_to_the_application(leader: Leading) -> None:
    answer, enter = asyncio.Event(), leader.backend.enter

    async def enter_later(*arguments: Any) -> Any:
        await answer.wait()
        return await enter(*arguments)

    leader.backend.enter = enter_later
    scheduler = AsyncIOScheduler(timezone="UTC")
    for n in range(40):  # more than the loop has threads
        scheduler.add_job(thread_job, "date", run_date=soon(), id=f"job-{n}")
    duties = await leader.lead(scheduler)
    await eventually(lambda: duties._gate.under_way == 40, "all of them are waiting")
    async with asyncio.timeout(5):
        # As whoever connects to the store by its host's name.
        await asyncio.get_running_loop().getaddrinfo("localhost", None)
    assert ran == []
    answer.set()
    await eventually(lambda: len(ran) == 40, "their runs")


async def test_an_executor_on_a_schedulers_own_thread_is_refused(leader: Leading) -> None:
    scheduler = BackgroundScheduler(timezone="UTC", executors={"default": DebugExecutor()})
    scheduler.add_job(thread_job, "date", run_date=soon(), id="job")
    with events(scheduler, EVENT_JOB_ERROR) as seen:
        await leader.lead(scheduler)
        await eventually(lambda: seen, "the refusal")
    assert isinstance(seen[0].exception, ConfigurationError)
    assert ran == []


async def test_a_tick_that_waits_for_its_slot_when_its_worker_dies_gets_a_row_however_long_it_has_waited(
    database: str,
) -> None:
    release, started = threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        release.wait(30)

    beginning = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=1)

    def make_scheduler() -> Any:
        scheduler = BackgroundScheduler(timezone="UTC", executors={"default": ThreadPoolExecutor(1)})
        scheduler.add_job(slow, "date", run_date=beginning, id="slow")
        scheduler.add_job(thread_job, "cron", second=beginning.second, id="waiting")
        return scheduler

    try:
        async with leading(database) as first:
            duties = await first.lead(make_scheduler(), catch_up=0.2)
            await eventually(lambda: started.is_set() and duties._gate.under_way == 2, "one runs and one waits")
            await asyncio.sleep(1)
            duties._succession._settled_at = duties._succession._tidied_at = -1e9  # as after a minute
            await first.go_on(duties)
            await first.die()
            async with leading(database) as second:
                await second.lead(make_scheduler(), catch_up=0.2)
                [row, *_] = await second.runs("waiting")
                assert row.outcome == "missed"
    finally:
        release.set()


async def test_a_thread_whose_claim_is_on_its_way_when_the_application_stops_is_let_go(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = BackgroundScheduler(timezone="UTC")
    scheduler.add_job(thread_job, "date", run_date=soon(), id="job")
    singleton = Singleton(scheduler, database, drain=0.1, lease=2.0)
    sent = asyncio.Event()

    async def enter_never(*arguments: Any) -> Any:
        sent.set()
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    async with singleton.lifespan():
        singleton._backend.enter = enter_never  # type: ignore[union-attr, method-assign]
        await asyncio.wait_for(sent.wait(), 30)
    await eventually(lambda: asyncio.all_tasks() <= before, "its end", 5)
    assert ran == []
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_job_with_an_endless_name_runs_and_stops_nobody_else(leader: Leading) -> None:
    scheduler = AsyncIOScheduler(timezone="UTC")
    for name in ("short", os.urandom(2000).hex()):  # longer than what an index takes
        scheduler.add_job(ran.append, args=(name,), trigger="date", run_date=soon(), id=name)
    await leader.lead(scheduler)
    await eventually(lambda: len(ran) == 2, "the jobs' runs")
