"""The stores a storm can go over, each with the faults of its own."""

import asyncio
import shutil
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import asyncpg
import redis

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the wheel's import complains about a missing XDG_RUNTIME_DIR
    from example_app.embedded import EmbeddedPostgres
from example_app.embedded_redis import EmbeddedRedis


class Deployment(Protocol):
    url: str

    def start(self) -> None: ...
    def close(self) -> None: ...
    def faults(self) -> dict[str, Callable[[], None]]: ...
    def away(self) -> AbstractContextManager[None]:
        """It cannot be used while the block lasts."""


class OnPostgres:
    def __init__(self) -> None:
        self._server = EmbeddedPostgres()
        self.url = self._server.url

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        self._server.__exit__(None, None, None)

    def faults(self) -> dict[str, Callable[[], None]]:
        return {"cut sessions": self._cut, "restart store": self._server.restart, "kill store": self._kill}

    @contextmanager
    def away(self) -> Iterator[None]:
        self._server.stop()
        yield
        self._server.start()

    def _cut(self) -> None:
        async def cut() -> None:
            connection = await asyncpg.connect(self.url)
            try:
                await connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name LIKE 'fastapi_singleton:%'"
                )
            finally:
                connection.terminate()

        asyncio.run(cut())

    def _kill(self) -> None:
        self._server.kill()
        self._server.start()


class OnRedis:
    def __init__(self) -> None:
        self._server = EmbeddedRedis()
        self.url = self._server.url

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        self._server.__exit__(None, None, None)

    def faults(self) -> dict[str, Callable[[], None]]:
        return {"cut sessions": self._cut, "restart store": self._server.restart, "kill store": self._kill}

    @contextmanager
    def away(self) -> Iterator[None]:
        self._server.stop()
        yield
        self._server.start()

    def _cut(self) -> None:
        client: Any = redis.Redis.from_url(self.url)
        with client:
            for kind in ("normal", "pubsub"):
                client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")

    def _kill(self) -> None:
        self._server.kill()
        self._server.start()


class OnSqlite:
    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="fastapi_singleton_chaos_"))
        self._file = self._directory / "store.sqlite3"
        self.url = f"sqlite:///{self._file}"

    def start(self) -> None:
        """Nothing runs but the workers."""

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def faults(self) -> dict[str, Callable[[], None]]:
        return {"lock file": lambda: self._lock(3.0), "lock file briefly": lambda: self._lock(0.3)}

    @contextmanager
    def away(self) -> Iterator[None]:
        with closing(sqlite3.connect(self._file, timeout=20, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.execute("ROLLBACK")

    def _lock(self, seconds: float) -> None:
        with self.away():
            time.sleep(seconds)


DEPLOYMENTS: dict[str, Callable[[], Deployment]] = {"postgresql": OnPostgres, "redis": OnRedis, "sqlite": OnSqlite}
