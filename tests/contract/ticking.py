"""Jobs, and workers that lead them, for the tests of what becomes of each tick."""

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from fastapi_singleton import Run, current_run, job_policy
from fastapi_singleton.records import RunView

from ..conftest import eventually
from ..leading import Leading
from ..stores import RealStore

Workers = Callable[..., Any]
seen: list[Run] = []


def look() -> None:
    seen.append(current_run())


async def look_async() -> None:
    look()


def look_from_a_child(path: str) -> None:
    run = current_run()
    Path(path).write_text(f"{run.id} {run.job} {run.attempt} {run.token} {os.getpid()}")


def wait_for_a_file(path: str) -> None:
    """In a child: until the file is there, and not for ever; another one tells that it has begun."""
    Path(f"{path}.{os.getpid()}").touch()
    deadline = time.monotonic() + 30
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


@job_policy(on_crash="rerun")
def repeatable() -> None:
    look()


def soon() -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=1)


def scheduler_with(func: Any, trigger: str = "interval", kind: Any = AsyncIOScheduler, **options: Any) -> Any:
    scheduler = kind(timezone="UTC")
    if trigger == "interval" and not {"seconds", "minutes", "hours"} & set(options):
        options["hours"] = 1
    scheduler.add_job(func, trigger, **{"id": "job", **options})
    return scheduler


async def outcome(worker: Leading, *outcomes: str, count: int = 1, job: str = "job") -> list[RunView]:
    async def rows() -> Any:
        found = await worker.runs(job, *outcomes)
        return found if len(found) >= count else None

    found: Any = await eventually(rows, f"{count} row(s) of {job} with {outcomes}")
    return list(found)


async def pretend_known_since(store: RealStore, ago: timedelta) -> None:
    """As if the fleet had met the job that long ago, and nobody had led since."""
    await store.set_job("unit", "job", since=datetime.now(UTC) - ago)


def every_second(func: Any = look, **options: Any) -> Any:
    return scheduler_with(func, "cron", second="*", **options)
