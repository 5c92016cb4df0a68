"""A file of its own for each test."""

import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import datetime
from pathlib import Path

from fastapi_singleton.backends.sqlite.backend import SqliteBackend
from fastapi_singleton.backends.sqlite.schema import stamp
from fastapi_singleton.records import Entry, Term, Worker
from fastapi_singleton.timing import Timing

Open = Callable[..., SqliteBackend]

# Leads on the URL with the lease it is given, and says so at each renewal.
LEADER = """
import asyncio, sys
from fastapi_singleton.backends import find_store
from fastapi_singleton.records import Worker
from fastapi_singleton.timing import Timing

async def main():
    backend = find_store(sys.argv[1], None).open("contract", Worker.here(), Timing(float(sys.argv[2])))
    term = await backend.acquire()
    while term is not None and await backend.renew(term):
        print(term.token, flush=True)
        await asyncio.sleep(float(sys.argv[2]) / 4)

asyncio.run(main())
"""


class RealSqlite:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "store.sqlite3"
        self.url = f"sqlite:///{self.path}"

    async def unsee(self, name: str, worker: str) -> None:
        self.execute(
            "UPDATE fastapi_singleton_worker SET seen_after_boot = seen_after_boot - 3600 WHERE name = ? AND worker = ?",
            name, worker,
        )  # fmt: skip

    async def expire(self, name: str) -> None:
        self.execute("UPDATE fastapi_singleton_term SET expires_after_boot = 0 WHERE name = ?", name)

    async def give_up(self, name: str) -> None:
        self.execute(
            "UPDATE fastapi_singleton_run SET outcome = 'abandoned', finished_at = started_at"
            " WHERE name = ? AND outcome = 'running'", name,
        )  # fmt: skip

    async def put(self, entry: Entry, worker: str) -> None:
        self.execute(
            "INSERT INTO fastapi_singleton_run"
            " (name, job, tick, attempt, id, nonce, outcome, cause, token, worker, started_at)"
            " VALUES (?, ?, ?, ?, ?, ?, 'running', ?, ?, ?, ?)",
            entry.name, entry.job, stamp(entry.tick), entry.attempt, entry.id, entry.nonce, entry.cause, entry.token,
            worker, stamp(entry.tick),
        )  # fmt: skip

    async def set_job(
        self,
        name: str,
        key: str,
        *,
        since: datetime | None = None,
        anchor: datetime | None = None,
        removed: bool = False,
    ) -> None:
        self.execute(
            "UPDATE fastapi_singleton_job SET since = coalesce(?, since), anchor = coalesce(?, anchor), removed = ?"
            " WHERE name = ? AND key = ?", since and stamp(since), anchor and stamp(anchor), removed, name, key,
        )  # fmt: skip

    async def locks_after_two_days(self) -> int:
        self.execute(
            "UPDATE fastapi_singleton_term SET expires_after_boot = expires_after_boot - 172800 WHERE name LIKE 'lock:%'"
        )
        return len(self.execute("SELECT 1 FROM fastapi_singleton_term WHERE name LIKE 'lock:%'"))

    def close(self) -> None:
        """The directory is removed by its fixture."""

    def execute(self, sql: str, *arguments: object) -> list[sqlite3.Row]:
        """One statement behind the workers' backs, committed at once; what it returned."""
        with closing(sqlite3.connect(self.path, timeout=30, isolation_level=None)) as connection:
            connection.row_factory = sqlite3.Row
            return connection.execute(sql, arguments).fetchall()


@asynccontextmanager
async def open_workers(store: Path) -> AsyncIterator[Open]:
    """Opens backends as so many workers would, and closes them."""
    opened: list[SqliteBackend] = []

    def open_one(identity: Worker | None = None, *, lease: float = 10.0, path: Path = store) -> SqliteBackend:
        backend = SqliteBackend(str(path), "contract", identity or Worker.here(), Timing(lease))
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        await backend.close()


@contextmanager
def another_process(script: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A real one, as soon as it has said something."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline()
            yield started
        finally:
            started.kill()


async def elected(backend: SqliteBackend) -> Term:
    term = await backend.acquire()
    assert term is not None
    return term
