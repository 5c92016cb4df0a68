"""Runs cut short by a crash, of a job that is busy otherwise, on every store: made again once there is room, or a row says
why not."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fastapi_singleton import current_run, job_policy
from fastapi_singleton.records import Crowd, Ending, Entry, Verdict

from ..conftest import eventually
from ..leading import Leading
from ..stores import RealStore
from .ticking import Workers, outcome, scheduler_with

NOW = datetime.now(UTC).replace(microsecond=0)
BUSY = Entry("unit", "job", NOW - timedelta(seconds=1), limit=1)
CUT = Entry("unit", "job", NOW - timedelta(seconds=2), token=1)
attempts: list[int] = []


@job_policy(on_crash="rerun")
async def repeated() -> None:
    attempts.append(current_run().attempt)


@job_policy(on_crash="rerun", catch_up=2)
async def repeated_soon_or_never() -> None:
    attempts.append(current_run().attempt)


async def a_busy_worker(workers: Workers, store: RealStore) -> Leading:
    """Somebody who is there and runs the job; somebody else is gone in the middle of another run of it."""
    attempts.clear()
    other: Leading = await workers()
    await other.backend.attend()
    assert await other.ledger.enter(BUSY) is Verdict.YOURS
    await store.put(CUT, "gone")
    return other


def count_refusals(worker: Leading) -> list[Any]:
    """The answers that found no room, as they come."""
    enter = worker.backend.enter
    refusals: list[Any] = []

    async def heard(*arguments: Any) -> Any:
        answers = await enter(*arguments)
        refusals.extend(answer for answer in answers if isinstance(answer, Crowd))
        return answers

    worker.backend.enter = heard
    return refusals


async def test_a_repeat_that_finds_no_room_is_made_as_soon_as_there_is_some(workers: Workers, store: RealStore) -> None:
    other, leader = await a_busy_worker(workers, store), await workers()
    refusals = count_refusals(leader)
    await leader.lead(scheduler_with(repeated, "cron", year=2999))
    await eventually(lambda: len(refusals) >= 3, "tries")
    assert {row.attempt for row in await leader.runs("job")} == {1}
    assert not attempts
    await other.backend.finish([Ending(BUSY, "succeeded", 0.1)])
    await outcome(leader, "succeeded")
    await eventually(lambda: attempts == [2], "the repeat")
    rows = {(row.scheduled_for, row.attempt): row for row in await leader.runs("job")}
    assert rows[CUT.tick, 1].outcome == "abandoned"
    assert (rows[CUT.tick, 2].outcome, rows[CUT.tick, 2].cause) == ("succeeded", "rerun")
    assert len(rows) == 3


async def test_a_repeat_that_never_finds_room_has_a_row_that_says_so(workers: Workers, store: RealStore) -> None:
    await a_busy_worker(workers, store)
    leader = await workers()
    await leader.lead(scheduler_with(repeated_soon_or_never, "cron", year=2999))
    await eventually(lambda: leader.runs("job", "missed"), "a row")
    [row] = await leader.runs("job", "missed")
    assert (row.scheduled_for, row.attempt, row.cause) == (CUT.tick, 2, "rerun")
    assert row.error is not None
    assert not attempts


@pytest.mark.parametrize("led", [True, False])
async def test_a_repeat_that_finds_no_room_has_no_row(workers: Workers, store: RealStore, led: bool) -> None:
    await a_busy_worker(workers, store)
    worker = await workers()
    token = (await worker.elect()).token if led else None
    repeat = Entry("unit", "job", CUT.tick, 2, "rerun", token, limit=1)
    assert await worker.ledger.enter(repeat) is Verdict.FULL
    assert {row.attempt for row in await worker.runs("job")} == {1}


async def test_a_repeat_that_no_executor_takes_is_left_alone_for_a_while(
    workers: Workers, store: RealStore, caplog: pytest.LogCaptureFixture
) -> None:
    await a_busy_worker(workers, store)
    leader = await workers()
    duties = await leader.lead(scheduler_with(repeated, "cron", year=2999, executor="nowhere"))
    await eventually(lambda: "nowhere" in caplog.text, "a try")
    assert duties._succession._repeats is not None
    await asyncio.wait_for(duties._succession._repeats[1], 30)
    assert sum("nowhere" in line for line in caplog.messages) == 1
    assert {row.attempt for row in await leader.runs("job")} == {1}


async def test_many_repeats_that_find_no_room_do_not_keep_the_store_busy(workers: Workers, store: RealStore) -> None:
    await a_busy_worker(workers, store)
    leader = await workers()
    for i in range(1, 150):
        await store.put(Entry("unit", "job", CUT.tick - timedelta(seconds=i), token=1), "gone")
    refusals = count_refusals(leader)
    duties = leader.open(scheduler_with(repeated, "cron", year=2999))
    began = time.monotonic()
    await duties.take_up(await leader.elect())
    await eventually(lambda: len(refusals) > 150, "a second try")
    assert time.monotonic() - began >= 1.5  # fifteen times the shortest pause of a few


async def test_a_new_term_does_not_wait_for_the_repeats_of_the_one_before(workers: Workers, store: RealStore) -> None:
    await a_busy_worker(workers, store)
    leader = await workers()
    refusals = count_refusals(leader)
    duties = leader.open(scheduler_with(repeated, "cron", year=2999))
    await duties.take_up(await leader.elect())
    await eventually(lambda: refusals, "a try")
    duties.lay_down()
    await leader.resign()
    term = await leader.elect()
    refusals.clear()
    await duties.take_up(term)
    await eventually(lambda: refusals, "a try in the new term", patience=10.0)
