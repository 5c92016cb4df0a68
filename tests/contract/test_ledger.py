"""The ledger on a real PostgreSQL: who may claim which tick, and what becomes of a claim when things go wrong."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from fastapi_singleton.backends.postgres.schema import MIGRATIONS
from fastapi_singleton.errors import ConfigurationError, LostLeadershipError, StoreError
from fastapi_singleton.records import Ending, Entry, JobChange, JobNote, Run, Term, Verdict, run_id

from ..conftest import eventually
from ..leading import Leading, leading

NOW = datetime.now(UTC).replace(microsecond=0)
Workers = Callable[..., Any]


@pytest.fixture
async def workers(database: str) -> AsyncIterator[Workers]:
    """Makes workers, each with a session of its own."""
    async with AsyncExitStack() as stack:

        async def make(*, elected: bool = False, **options: Any) -> Leading:
            worker = await stack.enter_async_context(leading(database, **options))
            if elected:
                await worker.elect()
            return worker

        yield make


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
    return await worker.backend.enter(entries)


def as_run(entry: Entry) -> Run:
    return Run(entry.id, entry.job, entry.tick, entry.attempt, entry.token, entry.nonce)


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
    old.backend.forfeit()
    await new.elect()
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


async def test_claims_that_wait_together_share_a_round_trip(leader: Leading) -> None:
    session: Any = leader.backend._session
    sent: list[str] = []
    fetch = session.fetch

    async def counted(statement: str, *arguments: object) -> Any:
        sent.append(statement)
        return await fetch(statement, *arguments)

    session.fetch = counted
    entries = [claim(leader, NOW - timedelta(seconds=n)) for n in range(200)]
    verdicts = await asyncio.gather(*(leader.ledger.enter(entry) for entry in [*entries, claim(leader)]))
    assert verdicts == [Verdict.YOURS] * 200 + [Verdict.TAKEN]
    for entry in entries:
        leader.ledger.end(Ending(entry, "succeeded", 0.0))
    assert await leader.ledger.flush(30) == 0
    assert sent.count("enter") <= 3
    assert sent.count("finish") <= 2
    assert {row.outcome for row in await leader.runs("job")} == {"succeeded"}


@pytest.mark.parametrize("executed", [True, False])
async def test_a_lost_reply_is_resolved_by_sending_the_claim_again(leader: Leading, executed: bool) -> None:
    session: Any = leader.backend._session
    fetch = session.fetch

    async def lose_the_reply(statement: str, *arguments: object) -> Any:
        if executed:
            await fetch(statement, *arguments)
        session.terminate()
        raise StoreError("The reply was lost.", hint="none")

    session.fetch = lose_the_reply
    entry = claim(leader)
    assert await leader.ledger.enter(entry) is Verdict.YOURS
    assert [row.outcome for row in await leader.runs("job")] == ["running"]


async def test_a_claim_that_came_through_unheard_is_known_as_ones_own_also_under_a_newer_term(workers: Workers) -> None:
    old, new = await workers(elected=True), await workers()
    session: Any = old.backend._session
    fetch = session.fetch

    async def lose_the_reply_and_the_term(statement: str, *arguments: object) -> Any:
        await fetch(statement, *arguments)
        session.terminate()
        await new.elect()
        raise StoreError("The reply was lost.", hint="none")

    session.fetch = lose_the_reply_and_the_term
    assert await old.ledger.enter(claim(old)) is Verdict.YOURS
    assert await judged(new, claim(new)) == [Verdict.TAKEN]


async def test_a_refusal_in_doubt_is_asked_for_twice(workers: Workers) -> None:
    """The first question may have been put before the newer term's beginning, and not see a claim that came in between."""
    old, new = await workers(elected=True), await workers()
    entry = claim(old)
    old.backend.forfeit()
    await new.elect()
    asked: list[int] = []
    backend: Any = old.backend
    enter = backend.enter

    async def blind_at_first(entries: Any) -> Any:
        asked.append(len(entries))
        if len(asked) == 1:
            raise StoreError("The reply was lost.", hint="none")
        if len(asked) == 2:
            # What a statement sees whose snapshot is older than the claim's commit.
            await _insert(new, entry, old.worker.worker)
            return [Verdict.LOST]
        return await enter(entries)

    backend.enter = blind_at_first
    assert await old.ledger.enter(entry) is Verdict.YOURS
    assert len(asked) == 3


async def _insert(worker: Leading, entry: Entry, owner: str) -> None:
    session: Any = worker.backend._session
    await session._connection.execute(
        "INSERT INTO fastapi_singleton.run (name, job, tick, attempt, id, nonce, outcome, cause, worker, started_at)"
        " VALUES ('unit', $1, $2, $3, 'x', $4, 'running', 'schedule', $5, now())",
        entry.job, entry.tick, entry.attempt, entry.nonce, owner,
    )  # fmt: skip


async def test_a_claim_that_nobody_waits_for_any_more_is_written_down_as_abandoned(leader: Leading) -> None:
    enter = leader.backend.enter
    release = asyncio.Event()

    async def slow(entries: Any) -> list[Verdict]:
        verdicts = await enter(entries)
        await release.wait()
        return verdicts

    leader.backend.enter = slow  # type: ignore[method-assign]
    waiting = asyncio.create_task(leader.ledger.enter(claim(leader)))
    await eventually(lambda: leader.backend.runs("job", 1), "the claim")
    waiting.cancel()
    release.set()
    await eventually(lambda: waiting.done(), "the cancellation")
    assert [row.outcome for row in await leader.runs("job")] == ["abandoned"]


async def test_endings_wait_for_the_store_and_odd_text_does_not_hold_them_up(leader: Leading, admin: Any) -> None:
    entry, other = claim(leader), claim(leader, NOW - timedelta(seconds=1))
    await judged(leader, entry, other)
    leader.backend.forfeit()
    leader.ledger.end(Ending(entry, "failed", 0.25, "ValueError: \0 and \ud800 in it"))
    leader.ledger.end(Ending(other, "succeeded", 0.5))
    rows = await leader.runs("job")
    assert [row.outcome for row in rows] == ["succeeded", "failed"]
    assert rows[1].error is not None
    assert rows[1].error.startswith("ValueError")


# -- giving up, and its truth --------------------------------------------------------------------------------------------


async def test_runs_of_workers_that_are_gone_are_given_up_and_no_others(workers: Workers, admin: Any) -> None:
    gone, alive = await workers(elected=True), await workers()
    await alive.backend.acquire()
    entries = [claim(gone, NOW - timedelta(seconds=n)) for n in range(2)]
    await judged(gone, entries[0])
    assert await judged(alive, entries[1]) == [Verdict.YOURS]
    await gone.die()
    leader = await workers(elected=True)
    assert await leader.backend.sweep(leader.trusted) == 0
    await admin.execute(
        "UPDATE fastapi_singleton.worker SET last_seen_at = now() - interval '1 hour' WHERE worker = $1",
        gone.worker.worker,
    )
    assert await leader.backend.sweep(leader.trusted) == 1
    outcomes = {row.scheduled_for: row.outcome for row in await leader.backend.runs("job", 10)}
    assert outcomes == {entries[0].tick: "abandoned", entries[1].tick: "running"}


async def test_a_run_given_up_too_early_is_set_right_by_its_ending(workers: Workers, admin: Any) -> None:
    frozen = await workers(elected=True)
    entry = claim(frozen)
    await judged(frozen, entry)
    await admin.execute("UPDATE fastapi_singleton.run SET outcome = 'abandoned', finished_at = now()")
    assert await judged(frozen, entry) == [Verdict.TAKEN]  # asked again before it begins, it must not begin
    frozen.ledger.end(Ending(entry, "succeeded", 3.0))
    assert [row.outcome for row in await frozen.runs("job")] == ["succeeded"]


async def test_what_was_cut_short_is_listed_until_a_later_attempt_has_a_row(leader: Leading, admin: Any) -> None:
    assert leader.trusted is not None
    entry = claim(leader)
    await judged(leader, entry)
    await leader.backend.finish([Ending(entry, "abandoned", 0.0)])
    [cut] = await leader.backend.cut(leader.trusted, ["job"], 5, 60)
    assert (cut.job, cut.tick, cut.attempt) == ("job", NOW, 1)
    assert await leader.backend.cut(leader.trusted, ["other"], 5, 60) == []
    assert await leader.backend.cut(leader.trusted, ["job"], 1, 60) == []
    await judged(leader, claim(leader, attempt=2))
    assert await leader.backend.cut(leader.trusted, ["job"], 5, 60) == []


# -- the fence -----------------------------------------------------------------------------------------------------------


async def test_the_fence_lets_a_live_run_write_and_keeps_it_from_being_given_up(
    leader: Leading, admin: Any, database: str
) -> None:
    entry = claim(leader)
    await judged(leader, entry)
    store = leader.backend._store
    async with admin.transaction():
        await store.fence(admin, "unit", as_run(entry))
        other = await asyncpg.connect(database)
        swept = await other.fetch("SELECT 1 FROM fastapi_singleton.run FOR UPDATE SKIP LOCKED")
        assert swept == []
        # Its own ending does not wait for it either, nor does any other run's.
        assert await leader.backend.finish([Ending(entry, "succeeded", 0.0)]) == {entry.nonce}
        await other.close()
    assert await leader.backend.finish([Ending(entry, "succeeded", 0.0)]) == set()
    async with admin.transaction():
        with pytest.raises(LostLeadershipError, match="succeeded"):
            await store.fence(admin, "unit", as_run(entry))


async def test_the_fence_of_a_frozen_worker_does_not_hold_up_the_next_election(workers: Workers, admin: Any) -> None:
    frozen, next_one = await workers(elected=True), await workers()
    entry = claim(frozen)
    await judged(frozen, entry)
    async with admin.transaction():
        await frozen.backend._store.fence(admin, "unit", as_run(entry))
        await frozen.die()
        term = await next_one.elect()
        assert term.token > (entry.token or 0)
        assert await next_one.backend.renew(term)


async def test_the_fence_says_when_it_cannot_protect(leader: Leading, admin: Any, server_url: str) -> None:
    entry = claim(leader)
    await judged(leader, entry)
    store = leader.backend._store
    with pytest.raises(ConfigurationError, match="outside a transaction"):
        await store.fence(admin, "unit", as_run(entry))
    with pytest.raises(ConfigurationError, match="asyncpg connection"):
        await store.fence(object(), "unit", as_run(entry))
    elsewhere = await asyncpg.connect(server_url)
    try:
        async with elsewhere.transaction():
            with pytest.raises(ConfigurationError, match="no trace"):
                await store.fence(elsewhere, "unit", as_run(entry))
    finally:
        await elsewhere.close()


# -- old rows, and what the fleet remembers of a job ---------------------------------------------------------------------


async def test_a_deleted_tick_cannot_be_claimed_again(leader: Leading) -> None:
    assert leader.trusted is not None
    old, older_running, young = (claim(leader, NOW - timedelta(days=days)) for days in (3, 4, 1))
    await judged(leader, old, older_running, young)
    await leader.backend.finish([Ending(old, "succeeded", 0.0), Ending(young, "succeeded", 0.0)])
    assert await leader.backend.prune(leader.trusted, 2 * 86_400) == 1
    assert await leader.backend.prune(leader.trusted, 2 * 86_400) == 0
    ticks = {row.scheduled_for for row in await leader.backend.runs("job", 10)}
    assert ticks == {older_running.tick, young.tick}
    again = [claim(leader, old.tick), claim(leader, old.tick - timedelta(hours=1)), claim(leader, young.tick)]
    assert await judged(leader, *again) == [Verdict.PRUNED, Verdict.PRUNED, Verdict.TAKEN]
    assert await judged(leader, claim(leader, NOW - timedelta(days=2))) == [Verdict.YOURS]


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
    old.backend.forfeit()
    await new.elect()
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


async def test_tables_of_the_first_version_are_brought_up_to_date(workers: Workers, admin: Any) -> None:
    await admin.execute(MIGRATIONS[0])
    await admin.execute("INSERT INTO fastapi_singleton.schema_version (version) VALUES (1)")
    await admin.execute(
        "INSERT INTO fastapi_singleton.term (name, token, worker, hostname, pid, acquired_at, renewed_at)"
        " VALUES ('unit', 9223372036854775000, 'w', 'h', 1, now(), now())"
    )
    leader = await workers(elected=True)
    assert token(leader) == 9223372036854775001
    assert await judged(leader, claim(leader)) == [Verdict.YOURS]
    assert await admin.fetchval("SELECT max(version) FROM fastapi_singleton.schema_version") == len(MIGRATIONS)
