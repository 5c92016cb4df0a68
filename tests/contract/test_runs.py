"""A tick's way through a real scheduler and a real ledger: every tick gets a row, and the row says the truth."""

import asyncio
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_MAX_INSTANCES, EVENT_JOB_SUBMITTED
from apscheduler.executors.debug import DebugExecutor
from apscheduler.executors.pool import ProcessPoolExecutor, ThreadPoolExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

from fastapi_singleton import ConfigurationError, NoRunError, Singleton, current_run, job_policy
from fastapi_singleton.records import UNBEGUN, run_id

from ..conftest import eventually
from ..leading import Leading
from ..stores import RealStore
from .ticking import (
    Workers,
    look,
    look_async,
    look_from_a_child,
    outcome,
    scheduler_with,
    seen,
    soon,
    wait_for_a_file,
)


@pytest.fixture
async def leader(workers: Workers) -> Leading:
    worker: Leading = await workers()
    return worker


# -- for the job ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("func", "kind"), [(look, BackgroundScheduler), (look, AsyncIOScheduler), (look_async, AsyncIOScheduler)]
)
async def test_a_job_knows_which_run_it_is_in(leader: Leading, func: Any, kind: Any) -> None:
    due = soon()
    await leader.lead(scheduler_with(func, "date", kind, run_date=due))
    [row] = await outcome(leader, "succeeded")
    assert leader.trusted is not None
    [run] = seen
    assert (run.id, run.job, run.scheduled_for, run.attempt) == (run_id("unit", "job", due, 1), "job", due, 1)
    assert run.token == leader.trusted.token
    assert (row.id, row.scheduled_for, row.token, row.cause) == (run.id, due, run.token, "schedule")
    assert run.nonce not in repr(run)


async def test_a_job_in_a_process_pool_knows_it_too(leader: Leading, tmp_path: Path) -> None:
    out = tmp_path / "run"
    scheduler = BackgroundScheduler(timezone="UTC", executors={"default": ProcessPoolExecutor(1)})
    scheduler.add_job(look_from_a_child, "date", run_date=soon(), args=(str(out),), id="job")
    await leader.lead(scheduler)
    [row] = await outcome(leader, "succeeded")
    told, job, attempt, token, pid = out.read_text().split()
    assert (told, job, attempt, token) == (row.id, "job", "1", str(row.token))
    assert int(pid) != os.getpid()
    scheduler._executors["default"]._pool.shutdown()


async def test_a_lifespan_with_a_process_pool_ends_also_if_all_threads_of_the_loop_are_busy(tmp_path: Path) -> None:
    scheduler = AsyncIOScheduler(timezone="UTC", executors={"default": ProcessPoolExecutor(1)})
    scheduler.add_job(os.getpid, id="job")
    singleton = Singleton(scheduler, f"sqlite:///{tmp_path}/pool.sqlite3")
    go_on = threading.Event()
    async with singleton.lifespan():

        async def has_run() -> bool:
            return [run.outcome for run in await singleton.runs("job")] == ["succeeded"]

        await eventually(has_run, "a run in a child")
        busy = [asyncio.get_running_loop().run_in_executor(None, go_on.wait, 20) for _ in range(40)]
        began = time.monotonic()
    took = time.monotonic() - began
    go_on.set()
    await asyncio.gather(*busy)
    assert took < 10


async def test_a_process_pools_children_end_with_the_lifespan_and_others_stand_ready(tmp_path: Path) -> None:
    def is_gone(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "XZ"
        except OSError:
            return True

    scheduler = AsyncIOScheduler(timezone="UTC", executors={"default": ProcessPoolExecutor(1)})
    out = tmp_path / "run"
    scheduler.add_job(look_from_a_child, "interval", seconds=0.2, args=(str(out),), id="job", misfire_grace_time=60)
    singleton = Singleton(scheduler, f"sqlite:///{tmp_path}/store.sqlite3")
    for _ in range(2):
        async with singleton.lifespan():
            await eventually(lambda: out.exists() and len(out.read_text().split()) == 5, "a run")
        child = int(out.read_text().split()[-1])
        await eventually(partial(is_gone, child), "the child's end")
        out.unlink()


def test_outside_a_job_there_is_no_run() -> None:
    with pytest.raises(NoRunError, match="inside a scheduled job"):
        current_run()


@pytest.mark.parametrize("arguments", [{"on_crash": "maybe"}, {"catch_up": -1}, {"catch_up": "soon"}])
def test_a_policy_that_cannot_be_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        job_policy(**arguments)


async def test_a_policy_longer_than_runs_are_kept_is_refused(leader: Leading) -> None:
    @job_policy(catch_up=3600)
    def patient() -> None: ...

    with pytest.raises(ConfigurationError, match="keep_runs"):
        leader.open(scheduler_with(patient), keep_runs=7000)


# -- rows with the truth -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AsyncIOScheduler, BackgroundScheduler])
async def test_a_job_that_raises_has_a_row_with_type_and_message_and_the_scheduler_lives(
    leader: Leading, kind: Any
) -> None:
    def failing() -> None:
        raise LookupError("no such ledger in postgresql://app:s3cr@et@db/app")

    await leader.lead(scheduler_with(failing, seconds=0.2, kind=kind))
    rows = await outcome(leader, "failed", count=2)
    assert {row.error for row in rows} == {"LookupError: no such ledger in postgresql://app:***@db/app"}
    assert all(row.finished_at is not None for row in rows)


async def test_a_child_that_dies_leaves_a_failed_run(leader: Leading) -> None:
    scheduler = BackgroundScheduler(timezone="UTC", executors={"default": ProcessPoolExecutor(1)})
    scheduler.add_job(os._exit, "date", run_date=soon(), args=(9,), id="job")
    await leader.lead(scheduler)
    [row] = await outcome(leader, "failed")
    assert "BrokenProcessPool" in str(row.error)
    scheduler._executors["default"]._pool.shutdown()


async def test_no_tick_is_claimed_before_a_child_is_free_to_run_it(leader: Leading, tmp_path: Path) -> None:
    """Or a kill would leave a row behind for each that waits in the pool's queue."""
    scheduler = BackgroundScheduler(timezone="UTC", executors={"default": ProcessPoolExecutor(1)})
    due, go = soon(), tmp_path / "go"
    for name in ("first", "second", "third"):
        scheduler.add_job(wait_for_a_file, "date", run_date=due, args=(str(go),), id=name)
    duties = await leader.lead(scheduler)
    await eventually(lambda: duties._gate.under_way == 3, "their submission")
    await eventually(lambda: list(tmp_path.glob("go.*")), "the first child's start")
    go.touch()
    rows = [row for name in ("first", "second", "third") for row in await outcome(leader, "succeeded", job=name)]
    rows.sort(key=lambda row: row.started_at or due)
    for one, following in pairwise(rows):
        assert one.finished_at is not None
        assert following.started_at is not None
        assert following.started_at >= one.finished_at
    scheduler._executors["default"]._pool.shutdown()


async def test_a_tick_is_skipped_with_a_row_while_max_instances_run(leader: Leading) -> None:
    release = threading.Event()
    scheduler = scheduler_with(lambda: release.wait(30), seconds=0.2)
    events: list[Any] = []
    scheduler.add_listener(events.append, EVENT_JOB_MAX_INSTANCES | EVENT_JOB_SUBMITTED)
    await leader.lead(scheduler)
    try:
        skipped = await outcome(leader, "skipped", count=2)
        assert {row.error for row in skipped} == {"max_instances=1 runs of it were still alive"}
        assert {row.started_at for row in skipped} == {None}
        assert (await leader.runs("job"))[0].outcome == "running"
        assert {event.code for event in events} == {EVENT_JOB_MAX_INSTANCES, EVENT_JOB_SUBMITTED}
    finally:
        release.set()


async def test_ticks_that_are_coalesced_away_have_rows_that_say_so(leader: Leading) -> None:
    scheduler = scheduler_with(look, seconds=0.1, coalesce=True)
    duties = await leader.lead(scheduler)
    await eventually(lambda: seen, "a first run")
    with duties.scheduler._jobstores_lock:  # the scheduler is held up for a while, as by a blocked event loop
        threading.Event().wait(0.5)
    skipped = await outcome(leader, "skipped")
    assert all("coalesced into" in str(row.error) for row in skipped)
    rows = await leader.runs("job")
    gaps = {(b.scheduled_for - a.scheduled_for).total_seconds() for a, b in pairwise(rows)}
    assert gaps == {0.1}  # no tick without a row


async def test_a_job_removed_while_it_runs_is_still_written_down(leader: Leading) -> None:
    started, release = threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        release.wait(30)

    scheduler = scheduler_with(slow, seconds=0.2)
    await leader.lead(scheduler)
    await eventually(started.is_set, "its start")
    scheduler.remove_job("job")
    release.set()
    assert await outcome(leader, "succeeded")


async def test_an_executor_on_the_event_loops_thread_is_refused_with_a_hint(leader: Leading) -> None:
    scheduler = AsyncIOScheduler(timezone="UTC", executors={"default": DebugExecutor()})
    scheduler.add_job(look, "interval", seconds=0.2, id="job")
    errors: list[Any] = []
    scheduler.add_listener(lambda event: errors.append(getattr(event, "exception", None)))
    await leader.lead(scheduler)
    await eventually(lambda: any(isinstance(error, ConfigurationError) for error in errors), "the refusal")
    assert seen == []


async def test_a_coroutine_function_in_a_thread_pool_says_what_it_needs(leader: Leading) -> None:
    await leader.lead(scheduler_with(look_async, seconds=0.2, kind=BackgroundScheduler))
    row, *_ = await outcome(leader, "failed")
    assert "AsyncIOScheduler" in str(row.error)
    assert seen == []


async def test_a_coroutine_cut_short_by_the_end_is_abandoned_and_a_thread_stays_running(leader: Leading) -> None:
    started, release = threading.Event(), threading.Event()

    async def endless() -> None:
        await asyncio.Event().wait()

    def slow() -> None:
        started.set()
        release.wait(30)

    scheduler = scheduler_with(endless, "date", run_date=soon())
    scheduler.add_job(slow, "date", run_date=soon(), id="thread")
    duties = await leader.lead(scheduler)
    await outcome(leader, "running")
    await eventually(started.is_set, "the thread's start")
    duties.lay_down()
    assert await duties.drain(0.01) == 2
    await duties.close()
    [row] = await outcome(leader, "abandoned")
    assert "cut short" in str(row.error)
    assert [row.outcome for row in await leader.runs("thread")] == ["running"]
    release.set()


async def test_what_waits_for_its_slot_when_the_worker_stops_is_left_to_the_next_leader(leader: Leading) -> None:
    started, release = threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        release.wait(30)

    scheduler = scheduler_with(slow, "date", BackgroundScheduler, run_date=soon(), id="slow")
    scheduler.add_executor(ThreadPoolExecutor(1), "default")
    duties = await leader.lead(scheduler)
    await eventually(started.is_set, "the only slot's taking")
    scheduler.add_job(look, "date", run_date=soon(), id="job")
    await eventually(lambda: duties._gate.under_way == 2, "a job that waits for the slot")
    duties.lay_down()  # the term is still renewed while running jobs are waited for
    release.set()
    assert await duties.drain(30) == 0
    assert [row.outcome for row in await leader.runs("slow")] == ["succeeded"]
    assert await leader.runs("job") == []
    assert seen == []


@pytest.mark.parametrize("given_up", [True, False])
async def test_a_worker_that_stood_still_before_the_call_runs_only_what_nobody_has_given_up(
    leader: Leading, store: RealStore, given_up: bool
) -> None:
    enter = leader.backend.enter

    async def stand_still(entries: Any) -> Any:
        leader.backend.enter = enter
        verdicts = await enter(entries)
        leader.trusted = None
        if given_up:
            await store.give_up("unit")
        return verdicts

    duties = await leader.lead(scheduler_with(look))
    leader.backend.enter = stand_still
    duties.scheduler.add_job(look, "date", run_date=soon(), id="late")
    [row] = await outcome(leader, "abandoned", "succeeded", job="late")
    assert await duties.drain(30) == 0
    assert len(seen) == (0 if given_up else 1)
    # Once it is known that it never began, it counts no longer as alive.
    [row] = await leader.runs("late")
    assert (row.outcome, row.error) == (("abandoned", UNBEGUN) if given_up else ("succeeded", None))


async def test_a_tick_that_comes_up_before_the_stores_clock_allows_is_waited_for(workers: Workers) -> None:
    leader = await workers(lease=2.0)
    duties = await leader.lead(scheduler_with(look))
    told, heard = leader.backend._clock
    leader.backend._clock = told + timedelta(seconds=5), heard  # as if the store's clock had been set back since
    due = datetime.now(UTC) + timedelta(seconds=leader.timing.lease + 0.5)
    duties.scheduler.add_job(look, "date", run_date=due, id="early")
    await eventually(lambda: duties._gate.under_way, "its submission")
    [row] = await outcome(leader, "succeeded", job="early")
    assert row.scheduled_for == due
