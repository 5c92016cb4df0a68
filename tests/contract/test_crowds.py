"""`max_instances` over the whole fleet, on every store: which runs count as alive, and that counting and claiming are one."""

import asyncio
import dataclasses
import signal
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fastapi_singleton.errors import StoreError
from fastapi_singleton.processes import identity
from fastapi_singleton.records import GONE, SILENT, Crowd, Ending, Entry, JobNote, Term, Verdict

from ..conftest import eventually
from ..leading import Leading
from .ticking import Workers

NOW = datetime.now(UTC).replace(microsecond=0)
NEXT = NOW + timedelta(seconds=1)


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "300"])
    yield process
    process.kill()
    process.wait()


def claim(tick: datetime = NOW, limit: int | None = 1, **fields: Any) -> Entry:
    return Entry("unit", "job", tick, limit=limit, **fields)


async def other_worker(workers: Workers, process: str, **options: Any) -> tuple[Leading, Entry]:
    """A worker that is that process, with a run of the job."""
    worker: Leading = await workers(process=process, **options)
    entry = claim()
    await worker.backend.attend()
    assert await worker.ledger.enter(entry) is Verdict.YOURS
    return worker, entry


@pytest.mark.parametrize("led", [True, False])
async def test_a_tick_is_skipped_while_as_many_runs_are_alive_as_may_be(workers: Workers, led: bool) -> None:
    other, worker = await workers(), await workers()
    token = (await worker.elect()).token if led else None
    await other.backend.attend()
    first = claim()
    assert await other.ledger.enter(first) is Verdict.YOURS
    assert await other.ledger.enter(first) is Verdict.YOURS  # the same claim, sent again, does not count itself
    assert await worker.ledger.enter(claim(NEXT, token=token)) is Verdict.FULL
    [row] = await worker.runs("job", "skipped")
    assert row.error == f"max_instances=1 runs of it were alive, on {other.worker.worker}"
    assert row.started_at is None
    assert await worker.ledger.enter(claim(NEXT, token=token)) is Verdict.TAKEN
    later = NEXT + timedelta(seconds=1)
    assert await worker.ledger.enter(claim(later, 2, token=token)) is Verdict.YOURS
    assert await worker.ledger.enter(claim(later, 1, token=token, attempt=2)) is Verdict.FULL
    assert await worker.ledger.enter(dataclasses.replace(claim(NEXT), job="another", token=token)) is Verdict.YOURS


async def test_an_attempt_takes_the_place_of_the_others_of_its_tick(workers: Workers) -> None:
    worker = await workers()
    await worker.backend.attend()
    assert await worker.ledger.enter(claim()) is Verdict.YOURS
    assert await worker.ledger.enter(claim(attempt=2)) is Verdict.YOURS


async def test_a_run_that_has_ended_here_does_not_count_though_nobody_has_written_it_down(workers: Workers) -> None:
    worker = await workers()
    await worker.backend.attend()
    for second in range(50):
        entry = claim(NOW - timedelta(seconds=second))
        assert await worker.ledger.enter(entry) is Verdict.YOURS
        worker.ledger.end(Ending(entry, "succeeded", 0.1))


async def test_claims_of_one_job_that_wait_together_are_judged_one_after_the_other(workers: Workers) -> None:
    worker = await workers()
    await worker.backend.attend()
    ticks = [NOW - timedelta(seconds=second) for second in range(5)]
    verdicts = await asyncio.gather(*(worker.ledger.enter(claim(tick, 2)) for tick in ticks))
    assert verdicts == [Verdict.YOURS] * 2 + [Verdict.FULL] * 3


async def test_a_run_of_a_dead_process_does_not_count_from_the_moment_it_is_dead(
    workers: Workers, child: "subprocess.Popen[bytes]"
) -> None:
    await other_worker(workers, identity(child.pid))
    worker = await workers()
    assert await worker.ledger.enter(claim(NEXT)) is Verdict.FULL
    child.kill()
    child.wait()
    assert await worker.ledger.enter(claim(NEXT + timedelta(seconds=1))) is Verdict.YOURS


async def test_a_run_of_a_frozen_process_counts_until_the_process_is_gone(
    workers: Workers, child: "subprocess.Popen[bytes]"
) -> None:
    await other_worker(workers, identity(child.pid), lease=1.0)
    child.send_signal(signal.SIGSTOP)
    worker = await workers(lease=1.0)
    term = await worker.elect()

    async def unseen() -> Any:
        assert await worker.backend.renew(term)
        return await worker.backend.unseen(term)

    found: Any = await eventually(unseen, "that it is not seen any more")
    assert [*found.values()] == [identity(child.pid)]
    assert await worker.ledger.enter(claim(NEXT, token=term.token)) is Verdict.FULL  # nobody has given it up yet
    assert await worker.backend.sweep(term, found) == 1
    assert {row.error for row in await worker.runs("job", "abandoned")} == {SILENT}
    tick = NEXT + timedelta(seconds=1)
    assert await worker.ledger.enter(claim(tick, token=term.token)) is Verdict.FULL
    child.kill()
    child.wait()
    assert await worker.ledger.enter(claim(tick, token=term.token, attempt=2)) is Verdict.YOURS
    assert await worker.backend.unseen(term) == found
    assert await worker.backend.sweep(term) == 0
    assert {row.error for row in await worker.runs("job", "abandoned")} == {GONE}
    assert await worker.backend.unseen(term) == {}


async def test_a_run_of_an_unknown_process_counts_for_as_long_as_its_worker_is_seen(workers: Workers) -> None:
    boot = identity().partition("/")[0]
    await other_worker(workers, f"{boot}/pid:[another]/1/1", lease=1.0)  # in another container
    worker = await workers(lease=1.0)
    ticks = iter(range(1, 1000))

    async def room() -> bool:
        verdict = await worker.ledger.enter(claim(NOW - timedelta(seconds=next(ticks))))
        return verdict is Verdict.YOURS

    assert not await room()
    await eventually(room, "the end of its lease")


async def test_a_run_given_up_for_frozen_that_ends_after_all_counts_no_more(
    workers: Workers, child: "subprocess.Popen[bytes]"
) -> None:
    other, entry = await other_worker(workers, identity(child.pid), lease=1.0)
    worker = await workers(lease=1.0)
    term = await worker.elect()

    async def given_up() -> Any:
        assert await worker.backend.renew(term)
        return await worker.backend.sweep(term, [other.worker.worker])

    await eventually(given_up, "the sweep")
    assert await worker.ledger.enter(claim(NEXT, token=term.token)) is Verdict.FULL
    # By the ledger, which asks again: at this very moment the server ends its silent session.
    other.ledger.end(Ending(entry, "succeeded", 5.0))
    assert await other.ledger.flush(30) == 0
    assert await worker.ledger.enter(claim(NEXT + timedelta(seconds=1), token=term.token)) is Verdict.YOURS


async def test_two_that_claim_at_the_same_time_do_not_both_find_room(workers: Workers) -> None:
    racers = [await workers() for _ in range(2)]
    for racer in racers:
        await racer.backend.attend([])
        race = Term.race("unit", racer.worker.worker)
        await racer.backend.meet(race, [JobNote("job", "hourly", None, False)])
    for trial in range(100):
        ticks = [NOW - timedelta(seconds=2 * trial + n) for n in range(2)]
        entries = [claim(tick) for tick in ticks]
        answers = await asyncio.gather(
            *(racer.backend.enter([entry]) for racer, entry in zip(racers, entries, strict=True))
        )
        kinds = sorted(type(answer).__name__ for [answer] in answers)
        assert kinds == [Crowd.__name__, Verdict.__name__], trial
        for entry in entries:
            await racers[0].backend.finish([Ending(entry, "succeeded", 0.1)])


async def test_a_claim_and_a_remark_for_one_tick_do_not_stand_in_each_others_way(workers: Workers) -> None:
    worker = await workers()
    await worker.backend.attend()
    asked = worker.ledger.enter(claim())
    worker.ledger.remark([claim(limit=None, outcome="skipped", error="coalesced")])
    assert await asked is Verdict.YOURS
    assert await worker.ledger.enter(dataclasses.replace(claim(), job="another")) is Verdict.YOURS


async def test_a_claim_given_up_for_dead_before_anybody_heard_of_it_counts_no_more(workers: Workers) -> None:
    frozen, worker = await workers(lease=1.0), await workers(lease=1.0)
    await frozen.backend.attend()
    term = await worker.elect()
    entry = claim()

    async def meanwhile() -> None:
        async def given_up() -> Any:
            assert await worker.backend.renew(term)
            return await worker.backend.sweep(term, [frozen.worker.worker])

        await eventually(given_up, "the sweep")
        await frozen.backend.attend()  # it is seen again

    frozen.lose_the_next_reply(meanwhile=meanwhile)
    assert await frozen.ledger.enter(entry) is Verdict.TAKEN
    await frozen.ledger.flush(30)
    assert await worker.ledger.enter(claim(NEXT, token=term.token)) is Verdict.YOURS


async def test_what_cannot_be_written_down_is_told_and_keeps_nothing_else_from_it(workers: Workers) -> None:
    worker = await workers(lease=1.0)
    await worker.backend.attend()
    enter = worker.backend.enter

    async def choke(entries: Any, *more: Any) -> Any:
        if any(entry.job == "odd" for entry in entries):
            raise StoreError("The store chokes on it.", hint="none")
        return await enter(entries, *more)

    worker.backend.enter = choke
    worker.ledger.remark([Entry("unit", "odd", NOW, outcome="skipped")])
    assert await asyncio.wait_for(worker.ledger.enter(claim()), 60) is Verdict.YOURS
    await eventually(lambda: worker.ledger.problem == "The store chokes on it. Hint: none", "the problem")
    worker.backend.enter = enter
    await eventually(lambda: worker.ledger.problem is None, "its end")
