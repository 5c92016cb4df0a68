"""The leadership contract on a real PostgreSQL, and every reason to refuse one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from example_app.embedded import EmbeddedPostgres
from example_app.ports import free_port
from fastapi_singleton.backends.postgres import PostgresStore
from fastapi_singleton.backends.postgres.backend import PostgresBackend, lock_key
from fastapi_singleton.backends.postgres.schema import schema_sql
from fastapi_singleton.errors import StoreError, UnsafeStoreError
from fastapi_singleton.records import JobView, Term, Worker
from fastapi_singleton.timing import Timing

from ..conftest import eventually
from ..stores.limits import PGBOUNCER, pgbouncer, plain_role
from ..stores.sqlite import LEADER, another_process
from .proxy import FreezingProxy

Open = Callable[..., PostgresBackend]


@pytest.fixture
async def worker(database: str) -> AsyncIterator[Open]:
    """Opens backends as so many workers would, and closes them."""
    opened: list[PostgresBackend] = []

    def open_one(url: str = database, *, lease: float = 10.0, **more: Any) -> PostgresBackend:
        backend = PostgresStore.parse(url, **more).open("contract", Worker.here(), Timing(lease))
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        await backend.close()


async def elected(backend: PostgresBackend) -> Term:
    term = await backend.acquire()
    assert term is not None
    return term


async def test_many_workers_meeting_an_empty_database_elect_exactly_one(worker: Open) -> None:
    workers = [worker() for _ in range(12)]
    terms = await asyncio.gather(*(backend.acquire() for backend in workers))
    assert sum(term is not None for term in terms) == 1


async def test_tokens_grow_with_every_term_and_survive_a_release(worker: Open) -> None:
    first, second, tokens = worker(), worker(), []
    for backend in (first, second, first, first):
        term = await elected(backend)
        tokens.append(term.token)
        await backend.release(term)
    assert tokens == sorted(set(tokens))


async def test_a_token_is_never_behind_the_stores_clock(worker: Open, admin: Any) -> None:
    # So that it does not repeat where a store has lost its last writes.
    before = await admin.fetchval("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
    assert (await elected(worker())).token >= before


async def test_a_term_can_be_renewed_until_it_is_released_and_never_after(worker: Open) -> None:
    backend = worker()
    term = await elected(backend)
    assert await backend.renew(term)
    await backend.release(term)
    assert not await backend.renew(term)


async def test_a_session_that_was_cut_ends_its_term(worker: Open, admin: Any) -> None:
    leader, standby = worker(), worker()
    term = await elected(leader)
    await admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )

    async def cut() -> bool:
        try:
            return not await leader.renew(term)
        except StoreError:
            return True

    await eventually(cut, "the cut")
    assert not await leader.renew(term)
    assert (await elected(standby)).token > term.token
    assert await leader.acquire() is None


async def test_a_term_taken_from_it_in_the_table_is_over_and_frees_the_lock(worker: Open, admin: Any) -> None:
    leader, standby = worker(), worker()
    term = await elected(leader)
    await admin.execute("UPDATE fastapi_singleton.term SET token = token + 1")
    assert not await leader.renew(term)
    assert (await elected(standby)).token > term.token + 1


async def test_a_release_wakes_a_standby_long_before_its_poll(worker: Open) -> None:
    # A session that is silent for its lease is cut, which would wake the standby too.
    leader, standby = worker(lease=120.0), worker(lease=120.0)
    term = await elected(leader)
    assert await standby.acquire() is None
    waiting = asyncio.create_task(standby.vacancy(100))
    await asyncio.sleep(0)
    await leader.release(term)
    await asyncio.wait_for(waiting, 30)
    await elected(standby)


async def test_a_leaders_death_on_this_host_wakes_a_standby_long_before_its_poll(worker: Open, database: str) -> None:
    with another_process(LEADER, database, "60") as leader:
        standby = worker(lease=120.0)
        assert await standby.acquire() is None
        waiting = asyncio.create_task(standby.vacancy(100))
        await asyncio.sleep(0)
        leader.kill()
        await asyncio.wait_for(waiting, 30)
        await eventually(standby.acquire, "the lock's release")


async def test_news_between_asking_and_waiting_is_not_lost(worker: Open) -> None:
    leader, standby = worker(), worker()
    term = await elected(leader)
    assert await standby.acquire() is None
    await leader.release(term)
    await eventually(standby._vacancy._news.is_set, "the notification")
    await asyncio.wait_for(standby.vacancy(100), 30)


async def test_every_worker_sees_the_same_fleet(worker: Open) -> None:
    leader, standby = worker(), worker()
    term = await elected(leader)
    assert await leader.renew(term, [JobView("nightly", "cron", None, True)])
    assert await standby.acquire() is None
    assert await leader.renew(term)
    for backend in (leader, standby):
        fleet = backend.fleet
        assert fleet.leader is not None
        assert (fleet.leader.worker, fleet.leader.token) == (term.worker, term.token)
        assert [w.role for w in fleet.workers] == ["leader", "standby"]
        assert fleet.jobs == (JobView("nightly", "cron", None, True),)
    await standby.close()
    assert await leader.renew(term)
    assert len(leader.fleet.workers) == 1


async def test_one_connection_per_worker_and_one_statement_per_poll_and_renewal(worker: Open, admin: Any) -> None:
    leader, standby = worker(), worker()
    term = await elected(leader)
    assert await standby.acquire() is None
    count = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE application_name LIKE 'fastapi_singleton:%' AND datname = current_database()"
    )
    assert await admin.fetchval(count) == 2
    for backend, ask in ((leader, lambda: leader.renew(term)), (standby, standby.acquire)):
        session: Any = backend._session
        calls: list[str] = []
        fetch = session.fetch

        async def counted(statement: str, *arguments: object, fetch: Any = fetch, calls: list[str] = calls) -> Any:
            calls.append(statement)
            return await fetch(statement, *arguments)

        await ask()  # the first look at the jobs and runs takes one statement more
        session.fetch = counted
        await ask()
        assert len(calls) == 1
    assert await admin.fetchval(count) == 2


async def test_the_lease_is_set_on_the_locks_own_session(worker: Open, admin: Any) -> None:
    backend = worker(lease=4.0)
    await elected(backend)
    session: Any = backend._session
    shown = {
        name: await session._connection.fetchval(f"SHOW {name}")
        for name in (
            "idle_session_timeout", "idle_in_transaction_session_timeout", "statement_timeout", "lock_timeout",
            "client_connection_check_interval", "synchronous_commit",
        )
    }  # fmt: skip
    assert list(shown.values()) == ["4s", "4s", "1s", "1s", "1s", "on"]
    if session._version >= 170_000:
        assert await session._connection.fetchval("SHOW transaction_timeout") == "4s"
    held = await admin.fetchval(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND ((classid::bigint << 32) | objid::bigint) = $1",
        lock_key("contract"),
    )
    assert held == 1


@pytest.mark.parametrize("moment", ["after the request", "after Parse"])
async def test_a_leader_frozen_in_the_middle_of_talking_loses_its_lock(
    worker: Open, database: str, moment: str
) -> None:
    parts = urlsplit(database)
    async with FreezingProxy(parts.hostname or "localhost", parts.port or 5432) as proxy:
        host = f"postgres@127.0.0.1:{proxy.port}"
        leader = worker(urlunsplit(parts._replace(netloc=host)), lease=1.0)
        standby = worker()
        term = await elected(leader)
        assert await leader.renew(term)
        assert await standby.acquire() is None
        proxy.freeze(at_parse=moment == "after Parse")
        with pytest.raises(StoreError):
            await leader.renew(term)
        assert proxy.frozen
        # The server itself must end the session; the cut client can tell it nothing.
        await eventually(standby.acquire, "the lock's release")


async def test_a_leader_whose_statement_waits_for_a_table_loses_its_lock_too(worker: Open, admin: Any) -> None:
    leader, standby = worker(lease=1.0), worker()
    term = await elected(leader)
    async with admin.transaction():
        await admin.execute("LOCK TABLE fastapi_singleton.term")
        with pytest.raises(StoreError):
            await leader.renew(term)
    await eventually(standby.acquire, "the lock's release")


async def test_the_tables_are_asked_for_where_the_role_may_not_create_them(
    worker: Open, database: str, admin: Any
) -> None:
    async with plain_role(database, admin) as (role, url):
        with pytest.raises(UnsafeStoreError, match="fastapi-singleton schema"):
            await worker(url).acquire()
        await admin.execute(schema_sql(role))
        backend = worker(url)
        await elected(backend)
        await backend.close()


async def test_settings_that_did_not_stick_are_a_reason_to_refuse(
    worker: Open, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As behind a proxy that drops what it does not know.
    monkeypatch.setattr(
        "fastapi_singleton.backends.postgres.session._APPLY",
        "SELECT name, value FROM unnest($1::text[], $2::text[]) AS wanted (name, value)",
    )
    with pytest.raises(UnsafeStoreError, match="idle_session_timeout"):
        await worker().acquire()


async def test_the_application_may_make_the_connection_itself(worker: Open, database: str) -> None:
    made = []

    async def connect() -> Any:
        made.append(await asyncpg.connect(database))
        return made[-1]

    await elected(worker(None, connect=connect))
    assert len(made) == 1


async def test_a_pools_connection_is_refused(worker: Open, database: str) -> None:
    async with asyncpg.create_pool(database, min_size=1, max_size=1) as pool:
        taken = []

        async def connect() -> Any:
            taken.append(await pool.acquire())
            return taken[-1]

        with pytest.raises(UnsafeStoreError, match="takes its connections back"):
            await worker(None, connect=connect).acquire()
        await pool.release(taken[0])


async def test_what_a_failing_connect_says_is_not_repeated(worker: Open) -> None:
    async def connect() -> Any:
        raise RuntimeError("token s3cr3t has expired")

    with pytest.raises(StoreError, match="RuntimeError") as caught:
        await worker(None, connect=connect).acquire()
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("problem", ["refused", "no database", "wrong port"])
async def test_a_store_that_is_away_is_told_from_an_unsafe_one_and_shows_no_password(
    worker: Open, database: str, problem: str
) -> None:
    parts = urlsplit(database)
    host = parts.netloc.rpartition("@")[2]
    url = {
        "refused": f"postgresql://nobody_there:s3cr3t@{host}/postgres",
        "no database": f"postgresql://postgres:s3cr3t@{host}/s3cr3t_is_not_there",
        "wrong port": f"postgresql://postgres:s3cr3t@127.0.0.1:{free_port()}/postgres",
    }[problem]
    with pytest.raises(StoreError) as caught:
        await worker(url).acquire()
    assert not isinstance(caught.value, UnsafeStoreError)
    assert caught.value.hint
    assert "s3cr3t" not in str(caught.value).replace("/s3cr3t_is", "")
    assert caught.value.__cause__ is None


async def test_a_replica_is_refused(worker: Open, own_server: EmbeddedPostgres) -> None:
    with EmbeddedPostgres.replica_of(own_server) as replica:
        with pytest.raises(UnsafeStoreError, match="replica"):
            await worker(replica.url).acquire()

        async def connect() -> Any:
            return await asyncpg.connect(replica.url)

        with pytest.raises(UnsafeStoreError, match="replica"):
            await worker(None, connect=connect).acquire()


@pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed (Debian: apt-get install pgbouncer)")
async def test_a_transaction_pooler_is_refused_and_a_session_pooler_taken_at_the_users_word(
    worker: Open, database: str
) -> None:
    async with pgbouncer(database, "transaction") as url:
        with pytest.raises(UnsafeStoreError, match=r"pooler.*session mode"):
            await worker(url).acquire()
    async with pgbouncer(database, "session") as url:
        with pytest.raises(UnsafeStoreError, match="pooler"):
            await worker(url).acquire()
        backend = worker(f"{url}?pooler=session")
        await elected(backend)
        await backend.close()
