"""What is particular to the ledger on PostgreSQL: shared round trips, the fence, older tables."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from fastapi_singleton.backends.postgres.schema import MIGRATIONS
from fastapi_singleton.errors import ConfigurationError, LostLeadershipError
from fastapi_singleton.records import GONE, SILENT, Ending, Entry, JobView, Run, Verdict

from ..conftest import eventually
from ..leading import Leading, leading
from ..stores.postgres import RealPostgres
from .test_ledger import NOW, claim, judged, token


@pytest.fixture
async def leader(database: str) -> AsyncIterator[Leading]:
    async with leading(database) as worker:
        await worker.elect()
        yield worker


def as_run(entry: Entry) -> Run:
    return Run(entry.id, entry.job, entry.tick, entry.attempt, entry.token, entry.nonce)


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


async def test_a_session_that_met_an_empty_ledger_is_quick_when_there_are_thousands_of_rows(database: str) -> None:
    async with leading(database, lease=2.0) as worker:
        await worker.elect()
        once = [[claim(worker, NOW - timedelta(seconds=n))] for n in range(10)]
        many = [
            [claim(worker, NOW - timedelta(minutes=5, seconds=1000 * n + m)) for m in range(1000)] for n in range(5)
        ]
        for entries in [*once, *many]:
            # Cut short by the server, at a quarter of the lease, if it takes a look at each row for each of them.
            assert {*await worker.backend.enter(entries)} == {Verdict.YOURS}
            assert not await worker.backend.finish([Ending(entry, "succeeded", 0.0) for entry in entries])


async def test_an_election_waits_for_a_claim_that_is_under_way(leader: Leading, database: str, admin: Any) -> None:
    """Or the claim, refused when it is sent again under the newer term, could come through after that, and nobody runs it."""
    entry = claim(leader)
    leader.backend.forfeit()  # on its next session a claim has no lock that would keep others from leading
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

    async def are_waiting(count: int) -> bool:
        return bool(await admin.fetchval(waiting) == count)

    async with leading(database) as successor:
        holder = await asyncpg.connect(database)
        await holder.execute("BEGIN")
        # A row that may still come keeps the claim in the middle of its statement.
        await holder.execute(
            "INSERT INTO fastapi_singleton.run (name, job, tick, attempt, id, nonce, outcome, cause, worker)"
            " VALUES ('unit', 'job', $1, 1, '', '', 'running', 'schedule', '')", NOW,
        )  # fmt: skip
        claiming = asyncio.create_task(judged(leader, entry))
        await eventually(lambda: are_waiting(1), "the claim in its statement")
        electing = asyncio.create_task(successor.elect())
        try:
            await eventually(lambda: electing.done() or are_waiting(2), "the election")
            assert not electing.done()
        finally:
            await holder.close()
        assert await claiming == [Verdict.YOURS]
        assert (await electing).token > (entry.token or 0)


# -- the fence -----------------------------------------------------------------------------------------------------------


async def test_the_fence_lets_a_live_run_write_and_keeps_it_from_being_given_up(
    leader: Leading, admin: Any, database: str
) -> None:
    entry = claim(leader)
    await judged(leader, entry)
    store = leader.store
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


async def test_the_fence_of_a_frozen_worker_does_not_hold_up_the_next_election(
    leader: Leading, database: str, admin: Any
) -> None:
    frozen = leader
    entry = claim(frozen)
    await judged(frozen, entry)
    async with leading(database) as next_one, admin.transaction():
        await frozen.store.fence(admin, "unit", as_run(entry))
        await frozen.die()
        term = await next_one.elect()
        assert term.token > (entry.token or 0)
        assert await next_one.backend.renew(term)


async def test_the_fence_of_a_worker_that_is_gone_does_not_hold_up_the_sweep(
    leader: Leading, database: str, admin: Any
) -> None:
    """A sweep that waited for the row would be cut short by the server, and cost every leader its term."""
    store = RealPostgres(database)
    held, free = claim(leader), claim(leader, NOW - timedelta(seconds=1))
    await judged(leader, held, free)
    await leader.die()
    async with leading(database) as successor:
        term = await successor.elect()
        await store.unsee("unit", leader.worker.worker)
        async with admin.transaction():
            await successor.store.fence(admin, "unit", as_run(held))
            assert await successor.backend.sweep(term, [leader.worker.worker]) == 1
            assert await successor.backend.renew(term)
        assert await successor.backend.sweep(term, [leader.worker.worker]) == 1
        async with admin.transaction():
            # The connection of a host that has gone may stay open for hours, also after the fence has refused.
            with pytest.raises(LostLeadershipError):
                await successor.store.fence(admin, "unit", as_run(held))
            assert await successor.backend.sweep(term) == 0
            assert await successor.backend.renew(term)
        assert {row.error for row in await successor.runs("job")} == {GONE, SILENT}
        await successor.backend.sweep(term)
        assert {row.error for row in await successor.runs("job")} == {GONE}


async def test_the_fence_of_a_racer_does_not_hold_up_those_that_claim_the_same_tick(
    leader: Leading, database: str, admin: Any
) -> None:
    """A claim that waited for the winner's transaction would be cut short by the server, and its racer's part with it."""
    won = Entry("unit", "job", NOW)
    await judged(leader, won)
    async with leading(database) as racer, admin.transaction():
        await racer.store.fence(admin, "unit", as_run(won))
        same, another = Entry("unit", "job", NOW), Entry("unit", "another", NOW)
        assert await judged(racer, same, another) == [Verdict.TAKEN, Verdict.YOURS]


async def test_the_fence_says_when_it_cannot_protect(leader: Leading, admin: Any, server_url: str) -> None:
    entry = claim(leader)
    await judged(leader, entry)
    store = leader.store
    with pytest.raises(ConfigurationError, match="outside a transaction"):
        await store.fence(admin, "unit", as_run(entry))
    with pytest.raises(ConfigurationError, match="asyncpg connection"):
        await store.fence(object(), "unit", as_run(entry))
    async with admin.transaction():
        with pytest.raises(ConfigurationError, match="no trace"):
            await store.fence(admin, "unit", as_run(claim(leader)))  # the tick has a row, but it is not this claim's
    elsewhere = await asyncpg.connect(server_url)
    try:
        async with elsewhere.transaction():
            with pytest.raises(ConfigurationError, match="no trace"):
                await store.fence(elsewhere, "unit", as_run(entry))
    finally:
        await elsewhere.close()


async def test_tables_of_the_first_version_are_brought_up_to_date(database: str, admin: Any) -> None:
    await admin.execute(MIGRATIONS[0])
    await admin.execute("INSERT INTO fastapi_singleton.schema_version (version) VALUES (1)")
    await admin.execute(
        "INSERT INTO fastapi_singleton.term (name, token, worker, hostname, pid, acquired_at, renewed_at)"
        " VALUES ('unit', 9223372036854775000, 'w', 'h', 1, now(), now())"
    )
    async with leading(database) as leader:
        await leader.elect()
        assert token(leader) == 9223372036854775001
        assert await judged(leader, claim(leader)) == [Verdict.YOURS]
    assert await admin.fetchval("SELECT max(version) FROM fastapi_singleton.schema_version") == len(MIGRATIONS)


async def test_a_database_that_is_not_in_unicode_takes_any_name_and_any_limit(server_url: str, database: str) -> None:
    name = f"{urlsplit(database).path[1:]}_ascii"
    on_server = await asyncpg.connect(server_url)
    try:
        await on_server.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
        async with leading(urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))) as leader:
            term = await leader.elect()
            entry = replace(claim(leader), job="café", error="größer", limit=sys.maxsize)
            assert await judged(leader, entry) == [Verdict.YOURS]
            assert await leader.backend.renew(term, [JobView("café", "cron", None, False)])
            assert [job.id for job in leader.backend.fleet.jobs] == ["café"]
    finally:
        await on_server.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        on_server.terminate()
