"""The ledger on every store: who may claim which tick, and what becomes of a claim when things go wrong."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fastapi_singleton.errors import StoreError
from fastapi_singleton.records import Ending, Entry, JobChange, JobNote, Term, Verdict, run_id

from ..conftest import eventually
from ..leading import Leading
from ..stores import RealStore
from .ticking import Workers

NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture
async def leader(workers: Workers) -> Leading:
    worker: Leading = await workers(elected=True)
    return worker


def token(worker: Leading) -> int:
    assert worker.trusted is not None
    return worker.trusted.token


def claim(worker: Leading, tick: datetime = NOW, **fields: Any) -> Entry:
    return Entry("unit", "job", tick, **{"token": token(worker), **fields})


async def judged(worker: Leading, *entries: Entry) -> list[Verdict]:
    verdicts: list[Verdict] = await worker.backend.enter(entries)
    return verdicts


async def test_a_tick_and_attempt_is_claimed_once(leader: Leading) -> None:
    first = claim(leader)
    assert await judged(leader, first) == [Verdict.YOURS]
    assert await judged(leader, claim(leader)) == [Verdict.TAKEN]
    assert await judged(leader, claim(leader, attempt=2)) == [Verdict.YOURS]
    [second, row] = await leader.backend.runs("job", 10)
    assert (row.outcome, row.cause, row.attempt, row.token, row.worker) == (
        "running", "schedule", 1, token(leader), leader.worker.worker,
    )  # fmt: skip
    assert row.id == run_id("unit", "job", NOW, 1) != second.id
    assert row.scheduled_for == NOW


async def test_the_same_claim_again_is_the_same_claim_until_it_is_finished(leader: Leading) -> None:
    entry = claim(leader)
    assert await judged(leader, entry) == [Verdict.YOURS]
    assert await judged(leader, entry) == [Verdict.YOURS]
    assert await leader.backend.finish([Ending(entry, "succeeded", 1.5)]) == set()
    assert await judged(leader, entry) == [Verdict.TAKEN]
    [row] = await leader.backend.runs("job", 10)
    assert (row.outcome, row.duration_seconds) == ("succeeded", 1.5)


async def test_a_delayed_tick_is_still_accepted_after_a_later_one(leader: Leading) -> None:
    later, earlier = NOW, NOW - timedelta(seconds=1)
    assert await judged(leader, claim(leader, later)) == [Verdict.YOURS]
    assert await judged(leader, claim(leader, earlier)) == [Verdict.YOURS]


async def test_a_tick_beyond_the_stores_clock_has_to_wait_and_a_late_one_is_missed(leader: Leading) -> None:
    lease = leader.timing.lease
    ahead = datetime.now(UTC) + timedelta(seconds=lease + 60)
    soon = datetime.now(UTC) + timedelta(seconds=lease / 2)
    late = claim(leader, NOW - timedelta(hours=1), latest=NOW - timedelta(minutes=50))
    assert await judged(leader, claim(leader, ahead), claim(leader, soon), late) == [
        Verdict.EARLY, Verdict.YOURS, Verdict.WRITTEN,
    ]  # fmt: skip
    [row] = [row for row in await leader.backend.runs("job", 10) if row.scheduled_for == late.tick]
    assert row.outcome == "missed"
    assert row.started_at is None
    assert row.error is not None
    assert "after its time" in row.error


async def test_a_worker_that_lost_its_term_can_claim_nothing(workers: Workers) -> None:
    old, new = await workers(elected=True), await workers()
    claimed, unclaimed = claim(old), claim(old, NOW + timedelta(seconds=1))
    assert await judged(old, claimed) == [Verdict.YOURS]
    await new.take_from(old)()
    # On its new session it is anybody; what it had claimed before is still its own.
    assert await judged(old, claimed, unclaimed, claim(old)) == [Verdict.YOURS, Verdict.LOST, Verdict.LOST]
    assert await judged(new, claim(new), claim(new, unclaimed.tick)) == [Verdict.TAKEN, Verdict.YOURS]


async def test_a_released_term_can_claim_nothing(leader: Leading) -> None:
    entry = claim(leader)
    await leader.resign()
    assert await judged(leader, entry) == [Verdict.LOST]


async def test_of_two_sessions_that_claim_the_same_tick_at_once_one_wins(workers: Workers) -> None:
    first, second = await workers(elected=True), await workers()
    await second.backend.acquire()
    for n in range(100):
        tick = NOW - timedelta(seconds=n)
        answers = await asyncio.gather(judged(first, claim(first, tick)), judged(second, claim(first, tick)))
        assert sorted(v.value for [v] in answers) == ["taken", "yours"]


@pytest.mark.parametrize("executed", [True, False])
async def test_a_lost_reply_is_resolved_by_sending_the_claim_again(leader: Leading, executed: bool) -> None:
    leader.lose_the_next_reply(executed=executed)
    entry = claim(leader)
    assert await leader.ledger.enter(entry) is Verdict.YOURS
    assert [row.outcome for row in await leader.runs("job")] == ["running"]


async def test_a_claim_that_came_through_unheard_is_known_as_ones_own_also_under_a_newer_term(
    workers: Workers, store: RealStore
) -> None:
    old, new = await workers(elected=True), await workers()
    old.lose_the_next_reply(meanwhile=new.take_from(old))
    assert await old.ledger.enter(claim(old)) is Verdict.YOURS
    assert await judged(new, claim(new)) == [Verdict.TAKEN]


async def test_a_refusal_in_doubt_is_asked_for_twice(workers: Workers, store: RealStore) -> None:
    """The first question may have been put before the newer term's beginning, and not see a claim that came in between."""
    old, new = await workers(elected=True), await workers()
    entry = claim(old)
    await new.take_from(old)()
    asked: list[int] = []
    enter = old.backend.enter

    async def blind_at_first(entries: Any) -> Any:
        asked.append(len(entries))
        if len(asked) == 1:
            raise StoreError("The reply was lost.", hint="none")
        if len(asked) == 2:
            # What a statement sees whose snapshot is older than the claim's commit.
            await store.put(entry, old.worker.worker)
            return [Verdict.LOST]
        return await enter(entries)

    old.backend.enter = blind_at_first
    assert await old.ledger.enter(entry) is Verdict.YOURS
    assert len(asked) == 3


async def test_a_claim_that_nobody_waits_for_any_more_is_written_down_as_abandoned(leader: Leading) -> None:
    enter = leader.backend.enter
    release = asyncio.Event()

    async def slow(entries: Any) -> Any:
        verdicts = await enter(entries)
        await release.wait()
        return verdicts

    leader.backend.enter = slow
    waiting = leader.ledger.enter(claim(leader))
    await eventually(lambda: leader.backend.runs("job", 1), "the claim")
    waiting.cancel()
    release.set()
    await eventually(lambda: waiting.done(), "the cancellation")
    assert [row.outcome for row in await leader.runs("job")] == ["abandoned"]


async def test_a_claim_in_doubt_that_nobody_waits_for_any_more_does_not_stay_running(leader: Leading) -> None:
    """This worker lives on, so that no sweep would ever give the row up, and max_instances would count it for ever."""

    async def stop_waiting() -> None:
        waiting.cancel()

    leader.lose_the_next_reply(meanwhile=stop_waiting)
    waiting = leader.ledger.enter(claim(leader))
    await eventually(lambda: waiting.done(), "the cancellation")
    assert [row.outcome for row in await leader.runs("job")] == ["abandoned"]


async def test_endings_wait_for_the_store_and_odd_text_does_not_hold_them_up(leader: Leading) -> None:
    entry, other = claim(leader), claim(leader, NOW - timedelta(seconds=1))
    await judged(leader, entry, other)
    leader.backend.forfeit()
    leader.ledger.end(Ending(entry, "failed", 0.25, "ValueError: \0 and \ud800 in it"))
    leader.ledger.end(Ending(other, "succeeded", 0.5))
    rows = await leader.runs("job")
    assert [row.outcome for row in rows] == ["succeeded", "failed"]
    assert rows[1].error is not None
    assert rows[1].error.startswith("ValueError")


async def test_an_ending_settles_only_the_row_of_its_own_claim_and_only_once(workers: Workers) -> None:
    """Whoever is told that a tick is taken, and cannot know by whom, takes its claim back: the winner's goes on."""
    leader = await workers(elected=True)
    winner, loser = claim(leader), claim(leader)
    assert await judged(leader, winner) == [Verdict.YOURS]
    assert await judged(leader, loser) == [Verdict.TAKEN]
    assert await leader.backend.finish([Ending(loser, "abandoned", 0.0)]) == set()
    assert [row.outcome for row in await leader.backend.runs("job", 10)] == ["running"]
    await leader.backend.finish([Ending(winner, "succeeded", 1.0)])
    await leader.backend.finish([Ending(winner, "abandoned", 2.0)])
    [row] = await leader.backend.runs("job", 10)
    assert (row.outcome, row.duration_seconds) == ("succeeded", 1.0)


async def test_a_job_is_remembered_from_its_first_meeting_until_its_schedule_changes(leader: Leading) -> None:
    term, backend = leader.trusted, leader.backend
    assert term is not None
    note = JobNote("job", "hourly", NOW, False)
    first = (await backend.meet(term, [note]))["job"]
    assert first.new
    assert first.anchor == NOW
    again = (await backend.meet(term, [JobNote("job", "hourly", NOW + timedelta(minutes=7), False)]))["job"]
    assert (again.since, again.anchor, again.new) == (first.since, NOW, False)
    await backend.note(term, [JobChange("job", paused=True)])
    assert (await backend.meet(term, [note]))["job"].paused
    await backend.note(term, [JobChange("job", paused=False)])
    resumed = (await backend.meet(term, [note]))["job"]
    assert not resumed.paused
    assert resumed.since > first.since  # it owes nothing for the time it was paused
    await backend.note(term, [JobChange("job", since=NOW - timedelta(days=1))])
    assert (await backend.meet(term, [note]))["job"].since == resumed.since
    await backend.note(term, [JobChange("job", removed=True)])
    assert (await backend.meet(term, [note]))["job"].removed
    changed = (await backend.meet(term, [JobNote("job", "daily", None, False)]))["job"]
    assert changed.since > resumed.since
    assert not changed.removed


async def test_only_the_leader_may_change_what_is_remembered(workers: Workers) -> None:
    old, new = await workers(elected=True), await workers()
    term: Term = old.trusted
    await new.take_from(old)()
    for attempt in (
        old.backend.meet(term, [JobNote("job", "x", None, False)]), old.backend.note(term, [JobChange("job", paused=True)]),
        old.backend.sweep(term), old.backend.prune(term, 0), old.backend.ticks(term, {"job": NOW}),
    ):  # fmt: skip
        with pytest.raises(StoreError, match="term is over"):
            await attempt


async def test_runs_are_paged_from_the_newest_on(leader: Leading) -> None:
    ticks = [NOW - timedelta(seconds=n) for n in range(25)]
    await judged(leader, *(claim(leader, tick) for tick in ticks))
    first = await leader.backend.runs("job", 10)
    second = await leader.backend.runs("job", 10, first[-1].scheduled_for)
    third = await leader.backend.runs("job", 10, second[-1].scheduled_for)
    assert [row.scheduled_for for row in (*first, *second, *third)] == ticks
    assert await leader.backend.runs("nobody's", 10) == []
