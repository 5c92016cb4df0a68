"""A store that falls ill under a running application: it serves, says what is wrong, and leads again when it can."""

import sqlite3
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from example_app.embedded_redis import EmbeddedRedis
from example_app.server import Gunicorn
from fastapi_singleton import Singleton, current_run

from ..conftest import eventually

effects: Counter[datetime] = Counter()


@pytest.fixture(autouse=True)
def _no_effects_yet() -> None:
    effects.clear()


async def job() -> None:
    effects[current_run().scheduled_for] += 1


def application(url: str) -> Singleton:
    scheduler = AsyncIOScheduler(timezone="UTC")
    scheduler.add_job(job, "cron", second="*", id="job", coalesce=False)
    return Singleton(scheduler, url, lease=1.0)


async def goes_on(singleton: Singleton) -> None:
    """It leads, and a tick that was not due before now has run."""
    before = max(effects, default=None)
    await eventually(lambda: singleton.is_leader, "leadership", patience=60)
    await eventually(lambda: effects and (before is None or max(effects) > before), "a further tick", patience=60)


async def is_ill(singleton: Singleton) -> Any:
    async def told() -> Any:
        status = await singleton.status()
        return status if status.status == "degraded" and status.problems else None

    return await eventually(told, "the problem in the status")


async def ticks_are_complete() -> None:
    """No tick twice, and none left out between the first and the last."""

    def complete() -> bool:
        ticks = sorted(effects)
        return int((ticks[-1] - ticks[0]).total_seconds()) + 1 == len(ticks)

    await eventually(complete, "every tick", patience=60)
    assert set(effects.values()) == {1}


async def test_redis_that_goes_and_comes_back() -> None:
    with EmbeddedRedis() as server:
        singleton = application(server.url)
        async with singleton.lifespan():
            await goes_on(singleton)
            server.stop()
            status = await is_ill(singleton)
            assert not status.backend.reachable
            assert status.leader is None or not singleton.is_leader
            await eventually(lambda: not singleton.is_leader, "the end of its trust")
            server.start()
            await goes_on(singleton)
            await ticks_are_complete()


async def test_a_file_that_another_process_holds_locked(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite3"
    singleton = application(f"sqlite:///{file}")
    async with singleton.lifespan():
        await goes_on(singleton)
        other = sqlite3.connect(file, timeout=20, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            status = await is_ill(singleton)
            assert "lock" in status.problems[0]
            await eventually(lambda: not singleton.is_leader, "the end of its trust")
            other.execute("ROLLBACK")
        finally:
            other.close()
        await goes_on(singleton)
        await ticks_are_complete()


def replace_by_rubbish(file: Path) -> None:
    rubbish = file.with_suffix(".rubbish")
    rubbish.write_bytes(b"this is not a database" * 100)
    rubbish.replace(file)
    for part in ("-wal", "-shm"):  # from the log alone SQLite would restore the file
        file.with_name(file.name + part).unlink()


@pytest.mark.parametrize("deed", [Path.unlink, replace_by_rubbish])
async def test_a_file_that_is_deleted_or_replaced(tmp_path: Path, deed: Callable[[Path], object]) -> None:
    file = tmp_path / "store.sqlite3"
    singleton = application(f"sqlite:///{file}")
    async with singleton.lifespan():
        await goes_on(singleton)
        deed(file)
        if file.exists():
            await is_ill(singleton)
            for part in tmp_path.iterdir():
                part.unlink()
        await goes_on(singleton)
    assert set(effects.values()) == {1}


async def test_a_disk_that_is_full(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    small = mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=2m", "tmpfs")
    singleton = application(f"sqlite:///{small}/store.sqlite3")
    async with singleton.lifespan():
        await goes_on(singleton)
        filler = small / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(b"x" * 2**21)
        status = await is_ill(singleton)
        assert "disk" in status.problems[0]
        await eventually(lambda: not singleton.is_leader, "the end of its trust")
        filler.unlink()
        await goes_on(singleton)
        await ticks_are_complete()


async def test_a_disk_that_is_read_only(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    file = tmp_path / "store.sqlite3"
    singleton = application(f"sqlite:///{file}")
    async with singleton.lifespan():
        await goes_on(singleton)
    mounted(tmp_path, "--bind", str(tmp_path))
    mounted(tmp_path, "-o", "remount,bind,ro")
    async with singleton.lifespan():
        status = await is_ill(singleton)
        assert "cannot be written" in status.problems[0]
        before = Counter(effects)
        mounted(tmp_path, "-o", "remount,bind,rw")
        assert effects == before
        await goes_on(singleton)
        await ticks_are_complete()


def test_four_workers_with_nothing_but_the_package_run_each_tick_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTAPI_SINGLETON_URL", raising=False)
    log = tmp_path / "effects"
    with Gunicorn(
        "", app="tests.chaos.app:app", lease=2.0, directory=tmp_path, environment={"CHAOS_EFFECTS": str(log)}
    ) as gunicorn:
        gunicorn.wait_for(lambda s: len(s["workers"]) == 4 and len(s["runs"]) >= 8, "runs of four workers")
        status = gunicorn.status()
    assert status["backend"]["kind"] == "sqlite"
    assert (tmp_path / "fastapi_singleton.sqlite3").exists()
    lines = [line.split()[:3] for line in log.read_text().splitlines()]
    assert len(lines) == len({tuple(line) for line in lines})
