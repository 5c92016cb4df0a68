"""What an operator sees of the ticks: through the status, through a job's own page of runs, and when things go wrong."""

import asyncio
import shutil
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import httpx
import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from fastapi import FastAPI

from example_app.embedded import EmbeddedPostgres
from example_app.server import Gunicorn
from fastapi_singleton import LostLeadershipError, Singleton, StoreError, current_run
from fastapi_singleton.records import Entry

from ..conftest import eventually
from ..leading import leading


def application(url: str, scheduler: Any, **options: Any) -> tuple[Singleton, FastAPI]:
    singleton = Singleton(scheduler, url, **{"lease": 2.0, **options})
    app = FastAPI(lifespan=singleton.lifespan)
    app.include_router(singleton.router())
    return singleton, app


def scheduler_with(func: Any, **options: Any) -> Any:
    scheduler = AsyncIOScheduler(timezone="UTC")
    scheduler.add_job(func, "cron", second="*", **{"id": "job", **options})
    return scheduler


def client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_every_worker_shows_the_runs_and_each_jobs_last_one(database: str) -> None:
    async def job() -> None:
        raise ValueError("no luck today")

    first, app = application(database, scheduler_with(job))
    second, other_app = application(database, scheduler_with(job))
    async with first.lifespan(), second.lifespan(), client(app) as here, client(other_app) as there:
        for asked in (here, there):

            async def shown(asked: httpx.AsyncClient = asked) -> Any:
                status = (await asked.get("/scheduler/status")).json()
                return status if len(status["runs"]) >= 3 and status["jobs"] and status["jobs"][0]["last_run"] else None

            status: Any = await eventually(shown, "three runs in the status")
            run = status["runs"][0]
            assert set(run) == {
                "id", "job", "scheduled_for", "started_at", "finished_at", "duration_seconds", "outcome", "error",
                "attempt", "token", "worker", "cause",
            }  # fmt: skip
            ticks = [each["scheduled_for"] for each in status["runs"]]
            assert ticks == sorted(ticks, reverse=True)
            failed = next(each for each in status["runs"] if each["outcome"] == "failed")
            assert failed["error"] == "ValueError: no luck today"
            assert isinstance(failed["duration_seconds"], float)
            assert status["jobs"][0]["last_run"]["job"] == "job"
            assert len(status["versions"]) == 1


async def test_a_jobs_runs_are_paged_over_http(database: str) -> None:
    async def job() -> None: ...

    singleton, app = application(database, scheduler_with(job))
    async with singleton.lifespan(), client(app) as http:

        async def enough() -> Any:
            page = (await http.get("/scheduler/jobs/job/runs")).json()
            return page.get("runs") and len(page["runs"]) >= 3

        await eventually(enough, "three runs")
        first = (await http.get("/scheduler/jobs/job/runs", params={"limit": 2})).json()
        assert len(first["runs"]) == 2
        second = (
            await http.get("/scheduler/jobs/job/runs", params={"limit": 2, "before": first["next_before"]})
        ).json()
        assert second["runs"][0]["scheduled_for"] < first["runs"][-1]["scheduled_for"]
        assert (await http.get("/scheduler/jobs/nobody/runs")).status_code == 404
        for wrong in ({"limit": 0}, {"limit": 501}, {"before": "yesterday"}, {"before": "2026-01-01T00:00:00"}):
            assert (await http.get("/scheduler/jobs/job/runs", params=wrong)).status_code == 422


async def test_no_attempt_is_lost_between_two_pages(database: str) -> None:
    tick = datetime.now(UTC).replace(microsecond=0)
    rows = [(tick - timedelta(seconds=n), attempt) for n in range(3) for attempt in (3, 2, 1)]
    async with leading(database, name="default") as leader:
        term = await leader.elect()
        for at, attempt in rows:
            await leader.ledger.enter(Entry("default", "job", at, attempt, token=term.token))
    singleton, app = application(database, None)
    async with singleton.lifespan(), client(app) as http:
        for limit in (1, 2, 3, 4):
            found, before = [], None
            while True:
                params = {"limit": limit, **({"before": before} if before else {})}
                page = (await http.get("/scheduler/jobs/job/runs", params=params)).json()
                found += [(datetime.fromisoformat(run["scheduled_for"]), run["attempt"]) for run in page["runs"]]
                if (before := page["next_before"]) is None:
                    break
            assert found == rows


async def test_runs_are_not_shown_while_the_store_is_away_and_the_status_is(own_server: EmbeddedPostgres) -> None:
    async def job() -> None: ...

    singleton, app = application(own_server.url, scheduler_with(job))
    async with singleton.lifespan(), client(app) as http:
        await eventually(lambda: singleton.is_leader, "an election")
        own_server.stop()
        assert (await http.get("/scheduler/jobs/job/runs")).status_code == 503
        assert (await http.get("/scheduler/status")).status_code == 200


async def test_readers_are_told_in_bounded_time_of_a_store_that_hangs(own_server: EmbeddedPostgres) -> None:
    singleton = Singleton(url=own_server.url, lease=2.0)
    async with singleton.lifespan():
        await eventually(lambda: singleton.is_leader, "an election")
        with own_server.frozen():
            reading = [asyncio.create_task(singleton.runs("job")) for _ in range(6)]
            done, waiting = await asyncio.wait(reading, timeout=20)
            assert not waiting
            assert all(isinstance(each.exception(), StoreError) for each in done)
            with pytest.raises(StoreError):
                await asyncio.wait_for(singleton.runs("job"), 20)


async def test_two_services_under_one_name_are_told_so(database: str, caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None: ...

    first, _ = application(database, scheduler_with(job, id="ledger"))
    second, _ = application(database, scheduler_with(job, id="mails"))
    async with first.lifespan():
        await eventually(lambda: first.is_leader, "an election")
        async with second.lifespan():

            async def told() -> Any:
                status = await second.status()
                # A newcomer looks at the others before it shows itself, and has then only their version to tell of.
                return status if status.problems and len(status.versions) == 2 else None

            status: Any = await eventually(told, "the problem, and both versions")
            assert status.status == "degraded"
            assert "two names" in status.problems[0]
            assert not (await first.status()).problems
    assert any("two names" in record.message for record in caplog.records if record.levelname == "ERROR")


async def test_the_fence_protects_a_jobs_own_transaction(database: str) -> None:
    results: list[Any] = []
    singleton: Singleton

    async def job() -> None:
        connection = await asyncpg.connect(database)
        try:
            async with connection.transaction():
                await singleton.fence(connection)
            await connection.execute(
                "UPDATE fastapi_singleton.run SET outcome = 'abandoned' WHERE id = $1", current_run().id
            )
            try:
                async with connection.transaction():
                    await singleton.fence(connection)
            except LostLeadershipError as error:
                results.append(error)
        finally:
            await connection.close()

    singleton, _ = application(database, scheduler_with(job))
    async with singleton.lifespan():
        await eventually(lambda: results, "the refusal")
    assert "abandoned" in str(results[0])


async def test_a_store_killed_in_the_middle_of_claims_doubles_and_loses_nothing(own_server: EmbeddedPostgres) -> None:
    effects: Counter[tuple[str, datetime]] = Counter()

    async def job() -> None:
        run = current_run()
        effects[run.job, run.scheduled_for] += 1

    scheduler = AsyncIOScheduler(timezone="UTC")
    jobs = [f"job-{n}" for n in range(40)]
    for name in jobs:
        scheduler.add_job(job, "cron", second="*", id=name, coalesce=False, max_instances=100)
    singleton, _ = application(own_server.url, scheduler)
    async with singleton.lifespan():
        await eventually(lambda: effects, "the first runs")
        began = datetime.now(UTC)
        for _ in range(3):
            # Just after a whole second: the claims of forty jobs are on their way.
            await asyncio.sleep(1.002 - datetime.now(UTC).microsecond / 1e6)
            await asyncio.to_thread(own_server.kill)
            await asyncio.to_thread(own_server.start)
            count = len(effects)
            await eventually(lambda count=count: len(effects) > count, "runs after the restart")  # type: ignore[misc]
        ended = datetime.now(UTC)
        due = [
            began.replace(microsecond=0) + timedelta(seconds=n + 1) for n in range(int((ended - began).total_seconds()))
        ]
        assert due
        await eventually(
            lambda: all(effects[name, tick] for name in jobs for tick in due), "a run of every job at every tick"
        )
    assert set(effects.values()) == {1}


FAKETIME = shutil.which("faketime")


@pytest.mark.skipif(FAKETIME is None, reason="faketime is not installed (Debian: apt-get install faketime)")
@pytest.mark.parametrize("shift", ["-7m", "+7m"])
def test_a_worker_whose_clock_is_wrong_runs_the_ticks_of_the_stores_clock(
    own_server: EmbeddedPostgres, shift: str
) -> None:
    assert FAKETIME is not None
    with Gunicorn(own_server.url, workers=2, lease=2.0, prefix=(FAKETIME, "-f", shift)) as gunicorn:
        status = gunicorn.wait_for(
            lambda s: sum(run["outcome"] == "succeeded" for run in s["runs"] if run["job"] == "pulse") >= 4, "some runs"
        )
    now = datetime.now(UTC)
    runs = [run for run in status["runs"] if run["job"] == "pulse"]
    ticks = [datetime.fromisoformat(run["scheduled_for"]) for run in runs]
    assert all(abs(now - tick) < timedelta(minutes=2) for tick in ticks)
    assert len(set(ticks)) == len(ticks)
    assert {run["outcome"] for run in runs} <= {"succeeded", "running"}
    late = [datetime.fromisoformat(run["started_at"]) - tick for run, tick in zip(runs, ticks, strict=True)]
    assert max(late) < timedelta(seconds=30)
    assert min(late) > -timedelta(seconds=1)
