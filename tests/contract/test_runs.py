"""A tick's way through a real scheduler and a real ledger: every tick gets a row, and the row says the truth."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_MAX_INSTANCES, EVENT_JOB_SUBMITTED
from apscheduler.executors.debug import DebugExecutor
from apscheduler.executors.pool import ProcessPoolExecutor, ThreadPoolExecutor
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

from fastapi_singleton import ConfigurationError, NoRunError, Run, current_run, job_policy
from fastapi_singleton.records import RunView, run_id

from ..conftest import eventually
from ..leading import Leading, leading
from ..stores import RealStore

Workers = Callable[..., Any]
seen: list[Run] = []


@pytest.fixture(autouse=True)
def _nothing_seen_yet() -> None:
    seen.clear()


@pytest.fixture
async def workers(store: RealStore) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:

        async def make(**options: Any) -> Leading:
            worker: Leading = await stack.enter_async_context(leading(store.url, **options))
            return worker

        yield make


@pytest.fixture
async def leader(workers: Workers) -> Leading:
    worker: Leading = await workers()
    return worker


def look() -> None:
    seen.append(current_run())


async def look_async() -> None:
    look()


def look_from_a_child(path: str) -> None:
    run = current_run()
    Path(path).write_text(f"{run.id} {run.job} {run.attempt} {run.token} {os.getpid()}")


@job_policy(on_crash="rerun")
def repeatable() -> None:
    look()


def soon() -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=1)


def scheduler_with(func: Any, trigger: str = "interval", kind: Any = AsyncIOScheduler, **options: Any) -> Any:
    scheduler = kind(timezone="UTC")
    if trigger == "interval" and not {"seconds", "minutes", "hours"} & set(options):
        options["hours"] = 1
    scheduler.add_job(func, trigger, **{"id": "job", **options})
    return scheduler


async def outcome(worker: Leading, *outcomes: str, count: int = 1, job: str = "job") -> list[RunView]:
    async def rows() -> Any:
        found = await worker.runs(job, *outcomes)
        return found if len(found) >= count else None

    found: Any = await eventually(rows, f"{count} row(s) of {job} with {outcomes}")
    return list(found)


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
        raise LookupError("no such ledger")

    await leader.lead(scheduler_with(failing, seconds=0.2, kind=kind))
    rows = await outcome(leader, "failed", count=2)
    assert {row.error for row in rows} == {"LookupError: no such ledger"}
    assert all(row.finished_at is not None for row in rows)


async def test_a_child_that_dies_leaves_a_failed_run(leader: Leading) -> None:
    scheduler = BackgroundScheduler(timezone="UTC", executors={"default": ProcessPoolExecutor(1)})
    scheduler.add_job(os._exit, "date", run_date=soon(), args=(9,), id="job")
    await leader.lead(scheduler)
    [row] = await outcome(leader, "failed")
    assert "BrokenProcessPool" in str(row.error)
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


# -- from leader to leader -----------------------------------------------------------------------------------------------


async def pretend_known_since(store: RealStore, ago: timedelta) -> None:
    """As if the fleet had met the job that long ago, and nobody had led since."""
    await store.set_job("unit", "job", since=datetime.now(UTC) - ago)


def every_second(func: Any = look, **options: Any) -> Any:
    return scheduler_with(func, "cron", second="*", **options)


@pytest.mark.parametrize("coalesce", [True, False])
async def test_the_next_leader_runs_what_has_no_row_and_says_what_it_leaves_out(
    workers: Workers, store: RealStore, coalesce: bool
) -> None:
    first, second = await workers(), await workers()
    await first.lead(scheduler_with(look, "cron", minute="*", coalesce=coalesce))
    await first.die()
    await pretend_known_since(store, timedelta(minutes=20, seconds=10))
    await second.lead(scheduler_with(look, "cron", minute="*", coalesce=coalesce), catch_up=300)
    await eventually(lambda: len(seen) >= (1 if coalesce else 5), "what is caught up on")
    rows = [row for row in await second.runs("job") if row.cause == "catch_up"]
    by_outcome = {word: [r for r in rows if r.outcome == word] for word in ("succeeded", "skipped", "missed")}
    assert len(by_outcome["succeeded"]) + len(by_outcome["skipped"]) in (5, 6)
    assert bool(by_outcome["skipped"]) is coalesce
    assert len(rows) in (20, 21)
    assert all("at most 300 s late" in str(row.error) for row in by_outcome["missed"])
    assert sorted(run.scheduled_for for run in seen) == [row.scheduled_for for row in by_outcome["succeeded"]]


async def test_a_resumed_scheduler_does_not_replay_what_another_leader_ran(workers: Workers) -> None:
    first, second = await workers(), await workers()
    duties = await first.lead(every_second(coalesce=False))
    await outcome(first, "succeeded")
    duties.lay_down()
    await first.resign()
    others = await second.lead(every_second(coalesce=False))
    await outcome(second, "succeeded", count=3)
    others.lay_down()
    await second.resign()
    await first.take_up(duties)
    await outcome(first, "succeeded", count=5)
    ticks = [run.scheduled_for for run in seen]
    assert len(ticks) == len(set(ticks))
    gaps = {(b - a).total_seconds() for a, b in pairwise(sorted(ticks))}
    assert gaps == {1.0}


async def test_an_interval_goes_on_in_phase_under_the_next_leader(workers: Workers, store: RealStore) -> None:
    first, second = await workers(), await workers()
    await first.lead(scheduler_with(look, minutes=10))
    before = first._opened[0].jobs()[0].next_run_at
    await first.die()
    duties = await second.lead(scheduler_with(look, minutes=10))
    assert duties.jobs()[0].next_run_at == before
    # A fleet redeployed more often than the interval still comes to run it.
    await second.die()
    assert before is not None
    await store.set_job("unit", "job", anchor=before - timedelta(minutes=11))
    await pretend_known_since(store, timedelta(minutes=12))
    third = await workers()
    duties = await third.lead(scheduler_with(look, minutes=10))
    [row] = await outcome(third, "succeeded")
    assert row.cause == "catch_up"
    assert before is not None
    assert row.scheduled_for == before - timedelta(minutes=11)
    assert duties.jobs()[0].next_run_at == before - timedelta(minutes=1)


async def test_a_changed_schedule_owes_nothing_for_the_past(workers: Workers, store: RealStore) -> None:
    first, second = await workers(), await workers()
    await first.lead(scheduler_with(look, "cron", minute="*"))
    await first.die()
    await pretend_known_since(store, timedelta(minutes=30))
    await second.lead(scheduler_with(look, "cron", minute="*/2"))
    assert [row for row in await second.runs("job") if row.cause == "catch_up"] == []


@pytest.mark.parametrize("idiom", ["no trigger", "next_run_time", "past date"])
async def test_run_now_idioms_run_once_in_the_fleet(workers: Workers, idiom: str) -> None:
    def scheduler() -> Any:
        made = AsyncIOScheduler(timezone="UTC")
        if idiom == "no trigger":
            made.add_job(look, id="job")
        elif idiom == "next_run_time":
            made.add_job(look, "interval", hours=1, next_run_time=datetime.now(UTC), id="job")
        else:
            made.add_job(look, "date", run_date=datetime.now(UTC) - timedelta(seconds=5), id="job")
        return made

    first, second = await workers(), await workers()
    theirs = scheduler()
    await first.lead(scheduler())
    await outcome(first, "succeeded")
    await first.die()
    await second.lead(theirs)
    await second.ledger.flush(30)
    assert len(seen) == 1


async def test_a_paused_job_stays_paused_and_owes_nothing_when_it_is_resumed(
    workers: Workers, store: RealStore
) -> None:
    first, second, third = await workers(), await workers(), await workers()
    duties = await first.lead(every_second())
    await outcome(first, "succeeded")
    duties.scheduler.pause_job("job")
    await first.go_on(duties)
    await first.die()
    duties = await second.lead(every_second())
    assert duties.jobs()[0].paused
    ran = len(seen)
    await pretend_known_since(store, timedelta(minutes=5))
    duties.scheduler.resume_job("job")
    await second.go_on(duties)
    await eventually(lambda: len(seen) > ran, "its runs after the resumption")
    await second.die()
    duties = await third.lead(every_second())
    assert not duties.jobs()[0].paused
    assert not await third.runs("job", "missed", "skipped")


async def test_a_removed_job_stays_removed_until_it_is_added_again(workers: Workers) -> None:
    first, second, third = await workers(), await workers(), await workers()
    duties = await first.lead(every_second())
    duties.scheduler.remove_job("job")
    await first.go_on(duties)
    await first.die()
    duties = await second.lead(every_second())
    assert duties.jobs() == []
    duties.scheduler.add_job(look, "cron", second="*", id="job")
    await second.go_on(duties)
    await second.die()
    duties = await third.lead(every_second())
    assert [job.id for job in duties.jobs()] == ["job"]


async def test_a_finished_date_is_not_taken_for_removed(workers: Workers) -> None:
    first, second = await workers(), await workers()
    duties = await first.lead(scheduler_with(look, "date", run_date=soon()))
    await outcome(first, "succeeded")
    await first.go_on(duties)
    await first.die()
    later = soon() + timedelta(hours=1)
    duties = await second.lead(scheduler_with(look, "date", run_date=later))
    assert [job.next_run_at for job in duties.jobs()] == [later]


async def test_a_run_cut_short_by_a_crash_is_repeated_where_the_policy_says_so(
    workers: Workers, store: RealStore
) -> None:
    first, second = await workers(), await workers()
    started, release = threading.Event(), threading.Event()

    @job_policy(on_crash="rerun")
    def hangs() -> None:
        started.set()
        release.wait(30)

    due = soon()
    scheduler = scheduler_with(hangs, "date", run_date=due)
    scheduler.add_job(hangs, "date", run_date=due, id="skipped", executor="other")
    scheduler.add_executor(ThreadPoolExecutor(1), "other")
    await first.lead(scheduler)
    await outcome(first, "running")
    await first.die()
    release.set()
    await store.unsee("unit", first.worker.worker)
    rerun = scheduler_with(repeatable, "interval", hours=1)
    rerun.add_job(look, "interval", hours=1, id="skipped")
    await second.lead(rerun)
    await outcome(second, "succeeded")
    [cut, again] = await second.runs("job")
    assert (cut.outcome, cut.attempt) == ("abandoned", 1)
    assert (again.outcome, again.attempt, again.cause) == ("succeeded", 2, "rerun")
    assert again.scheduled_for == cut.scheduled_for == due
    assert again.id != cut.id
    assert [run.attempt for run in seen] == [2]
    assert {row.outcome for row in await second.runs("skipped")} == {"abandoned"}


async def test_a_date_in_a_shared_store_is_not_lost_with_the_leader_that_was_about_to_run_it(
    workers: Workers, tmp_path: Path
) -> None:
    def scheduler() -> Any:
        return BackgroundScheduler(
            timezone="UTC", jobstores={"default": SQLAlchemyJobStore(f"sqlite:///{tmp_path}/jobs")}
        )

    first, second = await workers(lease=1.0), await workers(lease=1.0)
    due = soon()
    duties = await first.lead(scheduler())
    duties.scheduler.add_job(look, "date", run_date=due, id="job")
    asked = asyncio.Event()

    async def die_before_the_claim(_: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    first.backend.enter = die_before_the_claim
    await asyncio.wait_for(asked.wait(), 30)
    await first.die()
    duties = await second.lead(scheduler())
    [row] = await outcome(second, "succeeded")
    assert row.scheduled_for == due
    assert len(seen) == 1
    await eventually(lambda: duties.scheduler.get_jobs() == [], "its removal, now that it is in the ledger")


async def test_of_two_jobs_with_one_name_the_second_is_refused_alone(leader: Leading) -> None:
    scheduler = AsyncIOScheduler(timezone="UTC")
    for seconds in (1, 2):
        scheduler.add_job(look, "cron", second=f"*/{seconds}")
    scheduler.add_job(look_async, "cron", second="*")
    duties = await leader.lead(scheduler)
    assert sorted(job.id for job in duties.jobs()) == [f"{__name__}:look", f"{__name__}:look_async"]
    [problem] = duties.problems
    assert "id=" in problem
    await outcome(leader, "succeeded", job=f"{__name__}:look")
    await outcome(leader, "succeeded", job=f"{__name__}:look_async")


async def test_one_off_jobs_added_at_run_time_from_one_function_all_run(leader: Leading) -> None:
    scheduler = AsyncIOScheduler(timezone="UTC")
    await leader.lead(scheduler)
    for _ in range(5):
        scheduler.add_job(look, "date", run_date=soon())
    await eventually(lambda: len(seen) == 5, "all five")
    assert len({run.job for run in seen}) == 5


async def test_the_scheduler_follows_the_stores_clock_and_not_the_hosts(leader: Leading) -> None:
    await leader.elect()
    told, heard = leader.backend._clock
    shift = timedelta(minutes=40)
    leader.backend._clock = told + shift, heard  # as if the host were 40 minutes behind the store
    scheduler = every_second()
    duties = leader.open(scheduler)
    # Its claims would be refused as early; what counts here is what the scheduler takes for now.
    await leader.take_up(duties)
    [job] = duties.jobs()
    assert job.next_run_at is not None
    assert timedelta(minutes=39) < job.next_run_at - datetime.now(UTC) < timedelta(minutes=41)
