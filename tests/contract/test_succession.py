"""From leader to leader, on every store: what is caught up on, repeated, left alone."""

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

from fastapi_singleton import job_policy
from fastapi_singleton.records import Entry, Verdict
from fastapi_singleton.scheduling import SchedulerDuties

from ..conftest import eventually
from ..leading import Leading
from ..stores import RealStore
from .ticking import (
    Workers,
    every_second,
    look,
    look_async,
    outcome,
    pretend_known_since,
    repeatable,
    scheduler_with,
    seen,
    soon,
)


def sharing(directory: Path) -> BackgroundScheduler:
    """A scheduler that shares its jobs with any other one of that directory."""
    jobs = SQLAlchemyJobStore(f"sqlite:///{directory}/jobs")
    return BackgroundScheduler(timezone="UTC", jobstores={"default": jobs})


@pytest.fixture
async def leader(workers: Workers) -> Leading:
    worker: Leading = await workers()
    return worker


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


async def test_a_leader_that_stops_while_it_takes_over_keeps_its_term_for_as_long_as_it_drains(
    workers: Workers,
) -> None:
    """A question cut short would end the session, and the term with it, before running jobs have ended."""
    worker = await workers()
    duties = worker.open(every_second())
    term = await worker.elect()
    for steps in range(60):
        await duties.take_up(term)
        for _ in range(steps):
            await asyncio.sleep(0)
        duties.lay_down()
        await asyncio.sleep(0)
        assert await worker.backend.renew(term), steps


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


async def test_runs_are_given_up_only_once_the_store_has_had_the_time_to_see_their_workers(
    workers: Workers, store: RealStore
) -> None:
    """After the store was away nobody has been seen for a while, and all of them may be alive."""
    first, second = await workers(elected=True), await workers()
    entry = Entry("unit", "job", soon() - timedelta(seconds=1), token=first.trusted.token)
    assert await first.backend.enter([entry]) == [Verdict.YOURS]
    await first.die()
    await store.unsee("unit", first.worker.worker)
    steady: list[bool] = []
    duties = SchedulerDuties(scheduler_with(look), 600.0, 86_400.0)
    second.reopen(duties, is_steady=lambda: bool(steady))
    await second.take_up(duties)
    assert [row.outcome for row in await second.runs("job")] == ["running"]
    steady.append(True)
    duties.lay_down()
    await second.take_up(duties)
    assert [row.outcome for row in await second.runs("job")] == ["abandoned"]


@pytest.mark.parametrize("removed", [False, True])
async def test_a_date_cut_short_by_a_crash_is_repeated_though_no_scheduler_has_it_any_more(
    workers: Workers, store: RealStore, removed: bool
) -> None:
    first, second = await workers(), await workers()
    release = threading.Event()

    @job_policy(on_crash="rerun")
    def hangs() -> None:
        release.wait(30)

    due = soon()
    duties = await first.lead(scheduler_with(hangs, "date", run_date=due))
    await outcome(first, "running")
    await first.go_on(duties)  # the scheduler no longer has it, and the fleet is told of what the application did
    await first.die()
    release.set()
    await store.unsee("unit", first.worker.worker)
    if removed:
        await store.set_job("unit", "job", removed=True)
    scheduler = scheduler_with(repeatable, "date", run_date=due)
    scheduler.add_job(look, "date", run_date=soon(), id="later")
    duties = await second.lead(scheduler)
    assert scheduler.get_job("job") is None
    await outcome(second, "succeeded", job="later")
    await second.go_on(duties)
    if not removed:
        await outcome(second, "succeeded")
    rows = [(row.outcome, row.attempt, row.cause) for row in await second.runs("job")]
    assert rows == [("abandoned", 1, "schedule"), *([] if removed else [("succeeded", 2, "rerun")])]


async def test_a_date_in_a_shared_store_is_not_lost_with_the_leader_that_was_about_to_run_it(
    workers: Workers, tmp_path: Path
) -> None:
    first, second = await workers(lease=1.0), await workers(lease=1.0)
    due = soon()
    duties = await first.lead(sharing(tmp_path))
    duties.scheduler.add_job(look, "date", run_date=due, id="job")
    asked = asyncio.Event()

    async def die_before_the_claim(_: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    first.backend.enter = die_before_the_claim
    await asyncio.wait_for(asked.wait(), 30)
    await first.die()
    duties = await second.lead(sharing(tmp_path))
    [row] = await outcome(second, "succeeded")
    assert row.scheduled_for == due
    assert len(seen) == 1
    await eventually(lambda: duties.scheduler.get_jobs() == [], "its removal, now that it is in the ledger")


async def test_a_date_in_a_shared_store_is_not_taken_from_the_leader_that_is_to_run_it(
    workers: Workers, tmp_path: Path
) -> None:
    first, second = await workers(lease=1.0), await workers(lease=1.0)
    due = soon()
    duties = await first.lead(sharing(tmp_path))
    duties.scheduler.add_job(look, "date", run_date=due, id="job")
    enter = first.backend.enter
    refused = asyncio.Event()

    async def claim_too_late(entries: Any) -> Any:
        first.backend.enter = enter
        await second.take_from(first)()
        verdicts = await enter(entries)
        refused.set()
        return verdicts

    first.backend.enter = claim_too_late
    await asyncio.wait_for(refused.wait(), 30)
    await eventually(lambda: duties._gate.under_way == 0, "the end of the refused call")
    await first.die()
    await second.lead(sharing(tmp_path))
    [row] = await outcome(second, "succeeded")
    assert row.scheduled_for == due
    assert len(seen) == 1


async def test_of_two_jobs_with_one_name_the_second_is_refused_alone(leader: Leading) -> None:
    scheduler = AsyncIOScheduler(timezone="UTC")
    for seconds in (1, 2):
        scheduler.add_job(look, "cron", second=f"*/{seconds}")
    scheduler.add_job(look_async, "cron", second="*")
    duties = await leader.lead(scheduler)
    assert sorted(job.id for job in duties.jobs()) == [f"{look.__module__}:look", f"{look.__module__}:look_async"]
    [problem] = duties.problems
    assert "id=" in problem
    await outcome(leader, "succeeded", job=f"{look.__module__}:look")
    await outcome(leader, "succeeded", job=f"{look.__module__}:look_async")


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
