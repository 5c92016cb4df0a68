"""From an address to a session that leads, on a real PostgreSQL: what stands in the way, and what must not matter."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from fastapi_singleton import Singleton
from fastapi_singleton.backends.postgres import PostgresStore
from fastapi_singleton.backends.postgres.backend import PostgresBackend
from fastapi_singleton.election import Duties, Elector
from fastapi_singleton.errors import ConfigurationError, StoreError, UnsafeStoreError
from fastapi_singleton.records import Entry, JobView, Term, Verdict, Worker
from fastapi_singleton.timing import Timing

from ..conftest import eventually
from .proxy import FreezingProxy

Open = Callable[..., PostgresBackend]


class Wire(FreezingProxy):
    """Freezes behind the packet in which a word occurs, or behind one that is counted; delays each request."""

    def __init__(self, database: str, *, word: bytes | None = None, delay: float = 0.0) -> None:
        self._parts = urlsplit(database)
        super().__init__(self._parts.hostname or "localhost", self._parts.port or 5432)
        self._word, self._delay = word, delay
        self.packets_left: int | None = None

    async def __aenter__(self) -> "Wire":
        await super().__aenter__()
        self.url = urlunsplit(self._parts._replace(netloc=f"postgres@127.0.0.1:{self.port}"))
        return self

    async def _requests(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            asyncio.get_running_loop().call_later(self._delay, sink.write, data)
            if self.packets_left is not None:
                self.packets_left -= 1
            if self.packets_left == 0 or (self._word is not None and self._word in data):
                self.frozen = True
                await asyncio.Event().wait()
        raise asyncio.IncompleteReadError(b"", None)


@pytest.fixture
async def worker(database: str) -> AsyncIterator[Open]:
    """Opens backends as so many workers would, and closes them."""
    opened: list[PostgresBackend] = []

    def open_one(url: str | None = database, *, lease: float = 10.0, connect: Any = None) -> PostgresBackend:
        opened.append(PostgresStore.parse(url, connect).open("setup", Worker.here(), Timing(lease)))
        return opened[-1]

    yield open_one
    for backend in opened:
        await backend.close()


@asynccontextmanager
async def electing(backend: PostgresBackend, lease: float = 10.0) -> AsyncIterator[Elector]:
    elector = Elector(backend, Timing(lease), Duties())
    task = asyncio.create_task(elector.run())
    try:
        yield elector
    finally:
        elector.retire()
        await asyncio.wait_for(task, 30)


async def elected(backend: PostgresBackend) -> Term:
    term = await backend.acquire()
    assert term is not None
    return term


async def attempt(backend: PostgresBackend) -> Term | None:
    with suppress(StoreError):
        return await backend.acquire()
    return None


async def test_a_host_that_never_answers_does_not_hide_the_next_one_for_ever(worker: Open, database: str) -> None:
    parts = urlsplit(database)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]},{parts.hostname}:{parts.port}"
        backend = worker(urlunsplit(parts._replace(netloc=f"postgres@{hosts}")))
        with suppress(StoreError):
            await backend.connect()
        await elected(backend)


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(b"LISTEN", marks=pytest.mark.slow),
        b"CREATE SCHEMA",
        pytest.param(b"fastapi_singleton.job (", marks=pytest.mark.slow),
    ],
)
async def test_a_worker_frozen_while_it_sets_up_gives_up_in_time_and_stands_in_nobodys_way(
    worker: Open, database: str, word: bytes
) -> None:
    async with Wire(database, word=word) as wire:
        with pytest.raises(StoreError):
            await asyncio.wait_for(worker(wire.url).connect(), 30)
        assert wire.frozen
        standby = worker()
        await eventually(lambda: attempt(standby), "somebody else's election")


@pytest.mark.parametrize("packets", [1, 2, 3, 4])
async def test_a_worker_frozen_in_one_of_its_first_requests_loses_its_lock(
    worker: Open, database: str, packets: int
) -> None:
    async with Wire(database) as wire:
        leader = worker(wire.url, lease=2.0)
        await leader.connect()
        wire.packets_left = packets
        with suppress(StoreError):
            term = await elected(leader)
            while await leader.renew(term):
                pass
        assert wire.frozen
        standby = worker()
        await eventually(lambda: attempt(standby), "somebody else's election")


async def test_a_short_lease_holds_on_a_line_of_sixty_milliseconds(worker: Open, database: str, admin: Any) -> None:
    async with Wire(database, delay=0.06) as wire, electing(worker(wire.url, lease=1.0), 1.0) as elector:
        await eventually(lambda: elector.term, "an election")
        kept = "SELECT renewed_at > acquired_at + interval '1.2 s' FROM fastapi_singleton.term"
        await eventually(lambda: admin.fetchval(kept), "a term that outlasts its lease")


@pytest.mark.parametrize("dropped", ["term", "worker", "run", "job", "schema_version", "everything"])
async def test_tables_that_somebody_dropped_come_back_with_the_next_session(
    worker: Open, admin: Any, dropped: str
) -> None:
    backend = worker()
    term = await elected(backend)
    what = "SCHEMA fastapi_singleton" if dropped == "everything" else f"TABLE fastapi_singleton.{dropped}"
    await admin.execute(f"DROP {what} CASCADE")
    with suppress(StoreError):
        await backend.renew(term)
    backend.forfeit()
    assert await eventually(lambda: attempt(backend), "the next election")
    assert await admin.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'fastapi_singleton'") == 5


@pytest.mark.parametrize(
    ("setting", "hostile", "kept"),
    [
        ("default_transaction_isolation", "serializable", "read committed"),
        ("synchronous_commit", "off", "on"),
        ("idle_session_timeout", "0", "10s"),
    ],
)
async def test_defaults_of_the_database_do_not_matter(
    worker: Open, database: str, admin: Any, setting: str, hostile: str, kept: str
) -> None:
    await admin.execute(f"ALTER DATABASE {urlsplit(database).path[1:]} SET {setting} = '{hostile}'")
    workers = [worker() for _ in range(6)]
    terms = await asyncio.gather(*(backend.acquire() for backend in workers))
    [term] = [term for term in terms if term is not None]
    leader: Any = workers.pop(terms.index(term))
    for _ in range(5):
        answers = await asyncio.gather(leader.renew(term), *(backend.acquire() for backend in workers))
        assert answers == [True, None, None, None, None, None]
    assert await leader._session._connection.fetchval(f"SHOW {setting}") == kept


async def test_codecs_that_the_application_sets_on_its_connection_do_not_matter(worker: Open, database: str) -> None:
    async def connect() -> Any:
        connection = await asyncpg.connect(database)
        for kind in ("json", "jsonb"):
            await connection.set_type_codec(kind, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        return connection

    leader, standby = worker(None, connect=connect), worker(None, connect=connect)
    term = await elected(leader)
    assert await leader.enter([Entry("setup", "nightly", datetime.now(UTC), token=term.token)]) == [Verdict.YOURS]
    assert await leader.renew(term, [JobView("nightly", "cron", None, False)])
    assert await standby.acquire() is None
    for backend in (leader, standby):
        [job] = backend.fleet.jobs
        assert job.last_run == backend.fleet.runs[0] == (await backend.runs("nightly", 5))[0]


@pytest.mark.parametrize("kind", [OSError, TimeoutError, asyncio.CancelledError, asyncpg.InvalidPasswordError])
async def test_whatever_comes_out_of_connect_is_survived_and_not_repeated(
    worker: Open, database: str, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    go = asyncio.Event()

    async def connect() -> Any:
        if not go.is_set():
            raise kind("s3cr3t")
        return await asyncpg.connect(database)

    async with electing(worker(None, connect=connect)) as elector:
        problem = await eventually(lambda: elector.problem, "the problem")
        assert f"connect() raised {kind.__name__}" in str(problem)
        go.set()
        await eventually(lambda: elector.term, "an election")
    assert "s3cr3t" not in f"{problem}{caplog.text}"


async def test_a_connection_that_already_serves_a_worker_is_refused_to_another(worker: Open, database: str) -> None:
    connection = await asyncpg.connect(database)

    async def connect() -> Any:
        return connection

    first, second = worker(None, connect=connect), worker(None, connect=connect)
    term = await elected(first)
    with pytest.raises(UnsafeStoreError, match="in use here already"):
        await second.acquire()
    assert await first.renew(term)


async def test_a_connection_inside_a_transaction_is_refused(worker: Open, database: str) -> None:
    async def connect() -> Any:
        connection = await asyncpg.connect(database)
        await connection.execute("BEGIN")
        return connection

    with pytest.raises(UnsafeStoreError, match="inside a transaction"):
        await worker(None, connect=connect).acquire()


async def test_a_pool_whose_connections_are_refused_is_not_drained(worker: Open, database: str) -> None:
    async with asyncpg.create_pool(database, min_size=0, max_size=1) as pool:
        backend = worker(None, connect=lambda: pool.acquire(timeout=10))
        for _ in range(3):
            with pytest.raises(UnsafeStoreError, match="takes its connections back"):
                await backend.acquire()
        assert await pool.fetchval("SELECT 1", timeout=10) == 1


def test_a_password_that_was_not_encoded_is_not_taken_for_a_host_and_shown() -> None:
    for url in ("postgresql://postgres:12/s3cr3t%40host/db", "postgresql://postgres:12/s3cr3t@host/db"):
        with pytest.raises(ConfigurationError, match="percent-encode") as caught:
            Singleton(url=url)
        assert "s3cr3t" not in f"{caught.value!r} {caught.value.__cause__!r}"


@pytest.mark.parametrize("name", ["\ud800", "app\udfff", "nul\0", " ", "x" * 201])
def test_a_name_that_no_store_could_take_is_refused_at_construction(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot name a fleet"):
        Singleton(url="postgresql://localhost/app", name=name)


async def test_a_job_that_no_store_could_spell_does_not_cost_the_term(worker: Open) -> None:
    backend = worker()
    term = await elected(backend)
    assert await backend.renew(term, [JobView(text, text, None, False) for text in ("nul\0", "\ud800")])
    assert len(backend.fleet.jobs) == 2


async def test_a_standby_with_a_shorter_lease_still_sees_who_leads(worker: Open, admin: Any) -> None:
    leader, standby = worker(lease=60.0), worker(lease=2.0)
    term = await elected(leader)
    await admin.execute("UPDATE fastapi_singleton.term SET renewed_at = renewed_at - interval '15 s'")
    assert await standby.acquire() is None
    assert standby.fleet.leader is not None
    assert standby.fleet.leader.token == term.token


async def test_an_old_term_can_neither_be_renewed_nor_released_in_the_place_of_the_new_one(worker: Open) -> None:
    leader, standby = worker(), worker()
    old = await elected(leader)
    await leader.release(old)
    new = await elected(leader)
    assert not await leader.renew(old)
    await leader.release(old)
    assert await standby.acquire() is None
    assert await leader.renew(new)


async def test_a_released_term_keeps_its_token_and_says_when_it_ended(worker: Open, admin: Any) -> None:
    backend = worker()
    term = await elected(backend)
    await backend.release(term)
    row = await admin.fetchrow("SELECT token, released_at >= renewed_at AS ended FROM fastapi_singleton.term")
    assert tuple(row) == (term.token, True)
    await elected(backend)
    assert await admin.fetchval("SELECT released_at FROM fastapi_singleton.term") is None


@pytest.mark.parametrize("ahead", [10**15, -(10**12)])
async def test_a_token_exceeds_both_the_last_one_and_the_clock(worker: Open, admin: Any, ahead: int) -> None:
    backend = worker()
    term = await elected(backend)
    await backend.release(term)
    await admin.execute("UPDATE fastapi_singleton.term SET token = token + $1", ahead)
    again = await elected(backend)
    assert again.token == term.token + ahead + 1 if ahead > 0 else again.token >= term.token
