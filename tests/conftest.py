"""Real parts for all tests: a PostgreSQL from its wheel, or the one TEST_POSTGRES_URL names; a new database per test."""

import asyncio
import os
import shutil
import subprocess
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from .stores import RealStore
from .stores.postgres import RealPostgres
from .stores.redis import RealRedis
from .stores.sqlite import RealSqlite

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the wheel's import complains about a missing XDG_RUNTIME_DIR
    from example_app.embedded import EmbeddedPostgres
    from example_app.embedded_redis import EmbeddedRedis


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """A PostgreSQL shared by all tests that do not stop or break it."""
    if own := os.environ.get("TEST_POSTGRES_URL"):
        yield own
        return
    with EmbeddedPostgres() as server:
        yield server.url


def on_server(url: str, sql: str) -> None:
    async def execute() -> None:
        connection = await asyncpg.connect(url)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()

    asyncio.run(execute())


@pytest.fixture
def database(server_url: str) -> Iterator[str]:
    """The URL of a new, empty database."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    on_server(server_url, f"CREATE DATABASE {name}")
    yield urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
    on_server(server_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def own_server() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL to stop, kill and restart."""
    with EmbeddedPostgres() as server:
        yield server


@pytest.fixture
async def admin(database: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """A plain connection beside the workers', to look and to interfere."""
    connection = await asyncpg.connect(database)
    yield connection
    connection.terminate()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A Redis shared by all tests that do not stop or break it."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_store(redis_server: EmbeddedRedis) -> Iterator[RealRedis]:
    store = RealRedis(redis_server.url)
    yield store
    store.close()


STORES: dict[str, Callable[[pytest.FixtureRequest], RealStore]] = {
    "postgresql": lambda request: RealPostgres(request.getfixturevalue("database")),
    "redis": lambda request: RealRedis(request.getfixturevalue("redis_server").url),
    "sqlite": lambda request: RealSqlite(request.getfixturevalue("tmp_path")),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[RealStore]:
    """Each of the stores in turn, real and empty."""
    made = STORES[request.param](request)
    yield made
    made.close()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts something on a directory; only the superuser can."""
    places: list[Path] = []

    def mount(place: Path, *arguments: str) -> Path:
        place.mkdir(exist_ok=True)
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("mounting needs the superuser")
        done = subprocess.run(["mount", *arguments, str(place)], capture_output=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"mounting is not allowed here: {done.stderr.decode().strip()}")
        if place not in places:  # a remount adds no layer
            places.append(place)
        return place

    yield mount
    for place in reversed(places):
        subprocess.run(["umount", "--lazy", str(place)], check=True)


async def eventually(condition: Callable[[], object | Awaitable[object]], what: str, patience: float = 30.0) -> object:
    """Wait until the condition holds and return what it gave; fail after a generous deadline."""
    deadline = time.monotonic() + patience
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {patience} s"
        await asyncio.sleep(0.01)
