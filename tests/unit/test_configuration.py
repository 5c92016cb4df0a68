"""Wrong input is refused where it is given, with a hint and without a secret."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.blocking import BlockingScheduler

import fastapi_singleton
from fastapi_singleton import ConfigurationError, Singleton, job_policy

from ..conftest import eventually

URL = "postgresql://localhost/app"


def test_the_public_names_are_these() -> None:
    assert sorted(fastapi_singleton.__all__) == [
        "ConfigurationError",
        "LockHeldError",
        "LostLeadershipError",
        "NoRunError",
        "Run",
        "Singleton",
        "SingletonError",
        "Status",
        "StoreError",
        "__version__",
        "current_run",
        "job_policy",
    ]
    for name in fastapi_singleton.__all__:
        assert getattr(fastapi_singleton, name) is not None
    with pytest.raises(AttributeError):
        _ = fastapi_singleton.nothing_of_that_name


def patient_scheduler() -> Any:
    @job_policy(catch_up=1500)
    def job() -> None: ...

    scheduler = AsyncIOScheduler()
    scheduler.add_job(job, "interval", hours=1)
    return scheduler


@pytest.mark.parametrize(
    "arguments",
    [
        {"url": "mysql://localhost/app"},
        {"url": "localhost/app"},
        {"url": "postgresql://host:port/app"},
        {"url": "postgresql://host/app?pooler=transaction"},
        {"url": 5432},
        {"lease": 0},
        {"lease": -1},
        {"lease": True},
        {"lease": "10"},
        {"lease": float("nan")},
        {"lease": float("inf")},
        {"lease": 0.001},
        {"name": ""},
        {"name": "   "},
        {"name": None},
        {"mode": "both"},
        {"drain": -1},
        {"catch_up": None},
        {"catch_up": 600, "keep_runs": 600},
        {"connect": "postgresql://localhost/app"},
        {"url": "postgresql://host/app?sslmode=perhaps"},
        {"url": "postgresql://[::1/app"},
        {"enabled": "false"},
        {"scheduler": patient_scheduler(), "keep_runs": 2000},
        {"scheduler": object()},
        {"scheduler": BlockingScheduler()},
        {"scheduler": AsyncIOScheduler},
    ],
    ids=lambda arguments: re.sub(" object at 0x[0-9a-f]+", "", str(arguments)),
)
def test_wrong_configuration_is_refused_at_construction_with_a_hint(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"Hint: .+") as caught:
        Singleton(**{"url": URL, **arguments})
    assert caught.value.hint


async def test_what_cannot_be_served_called_or_run_is_refused_with_a_hint() -> None:
    singleton = Singleton(url=URL)

    async def with_argument(argument: int) -> None: ...

    for prefix in ("scheduler", "/scheduler/"):
        with pytest.raises(ConfigurationError, match=r"Hint: .+"):
            singleton.router(prefix=prefix)
    with pytest.raises(ConfigurationError, match=r"Hint: .+"):
        singleton.task(with_argument)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"Hint: .+"):
        await singleton.once("import", 5)  # type: ignore[arg-type]


def test_a_scheduler_that_is_already_running_is_refused() -> None:
    scheduler = BackgroundScheduler()
    scheduler.start()
    try:
        with pytest.raises(ConfigurationError, match=r"remove scheduler\.start"):
            Singleton(scheduler, URL)
    finally:
        scheduler.shutdown()


async def test_without_any_url_a_file_serves_this_host_and_the_log_says_what_serves_several(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTAPI_SINGLETON_URL", raising=False)
    singleton = Singleton()
    assert list(tmp_path.iterdir()) == []
    async with singleton.lifespan():
        await eventually(lambda: singleton.is_leader, "an election")
    assert (tmp_path / "fastapi_singleton.sqlite3").exists()
    assert sum("postgresql://" in record.message for record in caplog.records) == 1
    monkeypatch.setenv("FASTAPI_SINGLETON_URL", URL)
    assert "localhost" in repr(Singleton())


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:s3cr3t/word@host/app",
        "postgresql://user:s3cr3t#word@host/app",
        "postgresql://user:s3cr3t?word@host/app",
        "mysql://user:s3cr3t@host/app",
        "s3cr3t:password@host/app",
        "redis://:?s3cr3t@host/0",
        "redis://user:x?s3cr3t=1@host/0",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Singleton(url=url)
    assert "s3cr3t" not in str(caught.value)
    assert caught.value.__cause__ is None


async def test_one_lifespan_cannot_be_open_twice_but_can_be_entered_again(database: str) -> None:
    singleton = Singleton(url=database)
    async with singleton.lifespan():
        with pytest.raises(ConfigurationError, match="already open"):
            async with singleton.lifespan():
                pass
    async with singleton.lifespan():
        await asyncio.sleep(0)
