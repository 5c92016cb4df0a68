"""What becomes of workers on SQLite when their file or their disk lets them down."""

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fastapi_singleton.backends.sqlite import SqliteStore, ledger
from fastapi_singleton.backends.sqlite.schema import ensure_schema
from fastapi_singleton.errors import ConfigurationError, StoreError, UnsafeStoreError
from fastapi_singleton.records import Entry, Verdict

from ..conftest import eventually
from ..stores.sqlite import Open, RealSqlite, another_process, elected, open_workers

NOW = datetime.now(UTC).replace(microsecond=0)

LOCKER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""
STUCK = """
import asyncio, sys, time
from fastapi_singleton.backends.sqlite.database import Database
from fastapi_singleton.timing import Timing

async def main():
    database = await Database.open(sys.argv[1], Timing(0.4))
    try:
        await database.ask(lambda file: time.sleep(600))
    except Exception as error:
        print(error)

asyncio.run(main())
"""


@pytest.fixture
def real(tmp_path: Path) -> RealSqlite:
    return RealSqlite(tmp_path)


@pytest.fixture
async def worker(real: RealSqlite) -> AsyncIterator[Open]:
    async with open_workers(real.path) as open_one:
        yield open_one


# -- the file ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["deleted", "replaced", "its log deleted"])
async def test_a_file_that_is_not_the_one_at_its_path_is_let_go_of(worker: Open, real: RealSqlite, harm: str) -> None:
    leader, newcomer = worker(), worker()
    term = await elected(leader)
    if harm == "replaced":
        other = real.path.with_name("other")
        sqlite3.connect(other).close()
        os.replace(other, real.path)
    elif harm == "deleted":
        real.path.unlink()
    for log in real.path.parent.glob("*-wal"):
        log.unlink()
    entry = Entry("contract", "job", NOW, token=term.token)
    with pytest.raises(StoreError, match="deleted or replaced"):
        await leader.enter([entry])
    assert not await leader.renew(term)
    if harm == "its log deleted":
        return
    assert (await elected(newcomer)).token >= term.token
    assert await leader.acquire() is None  # on the new file


async def test_a_file_replaced_while_it_is_opened_is_not_taken_for_the_one_at_its_path(
    worker: Open, real: RealSqlite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would ever tell its worker from those on the other file: two leaders, with a ledger each."""
    await elected(worker())
    other = real.path.with_name("other")
    shutil.copy(real.path, other)

    def prepare_and_replace(connection: sqlite3.Connection) -> None:
        ensure_schema(connection)
        monkeypatch.undo()
        os.replace(other, real.path)

    monkeypatch.setattr("fastapi_singleton.backends.sqlite.database.ensure_schema", prepare_and_replace)
    late = worker()
    with pytest.raises(StoreError, match="deleted or replaced"):
        await late.connect()
    await late.connect()


async def test_what_was_written_into_a_file_that_went_away_meanwhile_does_not_count(
    worker: Open, real: RealSqlite, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = worker()
    term = await elected(backend)
    enter = ledger.enter

    def enter_and_lose(*arguments: Any) -> Any:
        verdicts = enter(*arguments)
        real.path.unlink()
        return verdicts

    monkeypatch.setattr(ledger, "enter", enter_and_lose)
    with pytest.raises(StoreError, match="deleted or replaced"):
        await backend.enter([Entry("contract", "job", NOW, token=term.token)])


async def test_a_file_locked_for_too_long_is_an_error_that_passes(worker: Open, real: RealSqlite) -> None:
    backend = worker(lease=1.0)
    term = await elected(backend)
    with another_process(LOCKER, str(real.path)) as locker:
        began = time.monotonic()
        with pytest.raises(StoreError, match="locked by another process") as caught:
            await backend.renew(term)
        assert time.monotonic() - began < 1.0
        assert not isinstance(caught.value, UnsafeStoreError)
        assert not await backend.renew(term)
        locker.kill()
        locker.wait()
    assert await backend.runs("job", 1) == []
    assert not await backend.renew(term)  # nor on the connection that the ledger has opened meanwhile
    assert (await elected(backend)).token > term.token


async def test_a_thread_that_is_stuck_holds_up_nobody_and_its_late_work_is_undone(
    worker: Open, real: RealSqlite
) -> None:
    backend = worker(lease=1.0)
    await elected(backend)
    database: Any = backend._database

    def stuck(file: Any) -> None:
        with file.writing() as transaction:
            transaction.execute("UPDATE fastapi_singleton_term SET token = token + 1000000")
            time.sleep(1.0)

    asking = asyncio.create_task(database.ask(stuck))
    beats = 0
    while not asking.done():
        await asyncio.sleep(0.01)
        beats += 1
    with pytest.raises(StoreError, match="did not answer in time"):
        await asking
    assert beats > 10
    [before] = real.execute("SELECT token FROM fastapi_singleton_term")
    await asyncio.sleep(1.0)
    term: Any = await eventually(backend.acquire, "the next term")
    assert term.token < before["token"] + 1_000_000


def test_a_stuck_thread_does_not_keep_the_process_from_ending(real: RealSqlite) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK, str(real.path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "did not answer in time" in done.stdout


async def test_what_is_no_database_is_refused_and_a_directory_that_has_gone_is_waited_for(
    worker: Open, tmp_path: Path
) -> None:
    rubbish = tmp_path / "rubbish"
    rubbish.write_text("no database " * 1000)
    with pytest.raises(UnsafeStoreError, match="no SQLite database"):
        await worker(path=rubbish).acquire()
    backend = worker(path=tmp_path / "gone" / "x")
    with pytest.raises(StoreError, match="cannot be opened"):
        await backend.acquire()
    (tmp_path / "gone").mkdir()
    await elected(backend)


async def test_tables_that_somebody_dropped_come_back(worker: Open, real: RealSqlite) -> None:
    backend = worker()
    term = await elected(backend)
    real.execute("DROP TABLE fastapi_singleton_run")
    with pytest.raises(StoreError, match="are gone"):
        await backend.enter([Entry("contract", "job", NOW, token=term.token)])
    assert (await elected(backend)).token > term.token
    assert await backend.runs("job", 1) == []


async def test_claims_and_reruns_do_not_read_the_whole_ledger(worker: Open, real: RealSqlite) -> None:
    await elected(worker())
    arguments = dict.fromkeys(
        ("name", "job", "tick", "attempt", "nonce", "since", "now", "me", "boot", "after_boot", "lease", "attempts",
         "before", "limit", "silent"), 1,
    )  # fmt: skip
    connection = sqlite3.connect(real.path)
    for sql in (
        ledger.WRITTEN, ledger.ALIVE, ledger.UNSETTLED, ledger.TICKS, ledger.SWEEP, ledger.DEAD, ledger.CUT, ledger.OLD,
        ledger.RUNS,
    ):  # fmt: skip
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", arguments)]
        plan = [step for step in plan if not step.startswith("SCAN json_each")]
        assert not [step for step in plan if step.startswith("SCAN") or "TEMP B-TREE" in step], sql
    connection.close()


# -- the disk ------------------------------------------------------------------------------------------------------------


async def test_a_file_that_has_become_read_only_is_refused(worker: Open, real: RealSqlite, mounted: Any) -> None:
    first = worker()
    await elected(first)
    await first.close()
    backend = worker()
    directory = real.path.parent
    mounted(directory, "--bind", str(directory))
    mounted(directory, "-o", "remount,bind,ro")
    with pytest.raises(UnsafeStoreError, match="cannot be written"):
        await backend.acquire()
    with pytest.raises(ConfigurationError, match="cannot be read and written"):
        SqliteStore.parse(real.url)
    with pytest.raises(ConfigurationError, match="is not writable"):
        SqliteStore.parse(f"{real.url}-elsewhere")


async def test_a_full_disk_is_an_error_that_passes(worker: Open, mounted: Any, tmp_path: Path) -> None:
    small = mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=512k", "tmpfs")
    backend = worker(path=small / "store.sqlite3")
    term = await elected(backend)
    filler = small / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(b"x" * 2**20)
    entries = [Entry("contract", "job", NOW - timedelta(seconds=n), token=term.token) for n in range(1000)]
    with pytest.raises(StoreError, match="disk") as caught:
        await backend.enter(entries)
    assert not isinstance(caught.value, UnsafeStoreError)
    filler.unlink()
    term = await elected(backend)
    assert await backend.enter([replace(entries[0], token=term.token)]) == [Verdict.YOURS]
    assert len(await backend.runs("job", 10)) == 1
