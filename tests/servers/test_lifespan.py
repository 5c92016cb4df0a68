"""The lifespan in a FastAPI application: both forms, again and again, and with the store away."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from fastapi import Depends, FastAPI, HTTPException
from fastapi.testclient import TestClient

from example_app.embedded import EmbeddedPostgres
from example_app.ports import free_port
from fastapi_singleton import Singleton, Status, current_run

from ..conftest import eventually
from ..stores import RealStore


def wait_for_status(client: TestClient, **wanted: Any) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while True:
        document: dict[str, Any] = client.get("/scheduler/status").json()
        if all(document[key] == value for key, value in wanted.items()):
            return document
        assert time.monotonic() < deadline, document
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [AsyncIOScheduler, BackgroundScheduler])
@pytest.mark.parametrize("form", ["direct", "inside"])
def test_one_line_in_the_lifespan_is_enough_and_works_again_after_the_first_time(
    database: str, kind: Any, form: str
) -> None:
    ran: list[int] = []
    scheduler = kind(timezone="UTC")
    scheduler.add_job(ran.append, "interval", seconds=0.05, args=(1,), id="job")
    singleton = Singleton(scheduler, database)

    @asynccontextmanager
    async def own_lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with singleton.lifespan(app):
            yield

    app = FastAPI(lifespan=singleton.lifespan if form == "direct" else own_lifespan)
    app.include_router(singleton.router())
    tokens = []
    for _ in range(2):
        ran.clear()
        with TestClient(app) as client:
            document = wait_for_status(client, status="ok")
            tokens.append(document["leader"]["token"])
            assert document["leader"]["worker"] == document["answered_by"]
            while not (jobs := client.get("/scheduler/status").json()["jobs"]):
                time.sleep(0.01)
            assert [job["id"] for job in jobs] == ["job"]
            while not ran:
                client.get("/scheduler/status")
        assert not singleton.is_leader
    assert tokens[1] > tokens[0]


def test_the_status_has_the_shape_of_the_contract(database: str) -> None:
    singleton = Singleton(url=database, name="shape", lease=4)
    app = FastAPI(lifespan=singleton.lifespan)
    app.include_router(singleton.router(prefix="/elsewhere"))
    app.include_router(singleton.router())
    with TestClient(app) as client:
        document = wait_for_status(client, status="ok")
        assert list(document) == [
            "status", "problems", "answered_by", "name", "mode", "backend", "lease_seconds",
            "worst_case_failover_seconds", "leader", "workers", "jobs", "runs", "versions",
        ]  # fmt: skip
        assert set(document["leader"]) == {"worker", "hostname", "pid", "token", "acquired_at", "renewed_at"}
        assert set(document["workers"][0]) == {
            "worker",
            "hostname",
            "pid",
            "role",
            "started_at",
            "last_seen_at",
            "version",
        }
        assert set(document["backend"]) == {"kind", "reachable", "detail"}
        assert (document["name"], document["mode"], document["lease_seconds"]) == ("shape", "leader", 4.0)
        assert document["leader"]["acquired_at"].endswith("Z")
        host, pid, tail = document["answered_by"].rsplit(":", 2)
        assert host
        assert int(pid) == document["leader"]["pid"]
        assert len(tail) == 8
        assert client.get("/elsewhere/status").status_code == 200


def test_the_router_can_be_guarded(database: str) -> None:
    def refuse() -> None:
        raise HTTPException(401)

    singleton = Singleton(url=database)
    app = FastAPI(lifespan=singleton.lifespan)
    app.include_router(singleton.router(dependencies=[Depends(refuse)]))
    with TestClient(app) as client:
        assert client.get("/scheduler/status").status_code == 401


def test_a_store_that_is_down_at_the_start_stops_nothing_and_shows_no_password(caplog: Any) -> None:
    singleton = Singleton(url=f"postgresql://someone:s3cr3t@127.0.0.1:{free_port()}/app")
    app = FastAPI(lifespan=singleton.lifespan)
    app.include_router(singleton.router())
    with caplog.at_level(logging.DEBUG, "fastapi_singleton"), TestClient(app) as client:
        document = wait_for_status(client, status="degraded")
        assert document["backend"]["reachable"] is False
        assert document["leader"] is None
        assert "cannot be reached" in document["problems"][0]
        assert "s3cr3t" not in client.get("/scheduler/status").text
    assert "s3cr3t" not in caplog.text


async def test_leadership_resumes_by_itself_when_the_store_comes_up(own_server: EmbeddedPostgres) -> None:
    own_server.stop()
    singleton = Singleton(url=own_server.url, lease=2)
    async with singleton.lifespan():
        await eventually(lambda: singleton._elector and singleton._elector.problem, "a problem")
        own_server.start()
        await eventually(lambda: singleton.is_leader, "an election")
        first = singleton.term
        own_server.restart()
        await eventually(lambda: singleton.term and singleton.term != first, "a new term")
        status = await singleton.status()
        assert isinstance(status, Status)
        assert status.problems == ()


async def test_a_leader_whose_store_went_away_shows_no_leader_once_its_lease_is_over(
    own_server: EmbeddedPostgres,
) -> None:
    singleton = Singleton(url=own_server.url, lease=1)
    async with singleton.lifespan():

        async def shown() -> bool:
            return bool((await singleton.status()).workers)

        await eventually(shown, "an election, and the fleet")
        own_server.stop()

        async def gone() -> bool:
            status = await singleton.status()
            return status.leader is None and not status.backend.reachable and status.status == "degraded"

        await eventually(gone, "the leader's disappearance")
        assert {worker.role for worker in (await singleton.status()).workers} == {"standby"}
        assert not singleton.is_leader


async def test_running_jobs_finish_before_the_leadership_is_handed_over(database: str) -> None:
    started, release, led_at_the_end = asyncio.Event(), asyncio.Event(), []
    scheduler = AsyncIOScheduler(timezone="UTC")
    singleton = Singleton(scheduler, database, drain=30)

    async def slow() -> None:
        started.set()
        await release.wait()
        led_at_the_end.append(singleton.is_leader)

    scheduler.add_job(slow, id="slow")
    successor = Singleton(url=database)
    async with singleton.lifespan():
        await eventually(started.is_set, "the job's start")
        successor_lifespan = successor.lifespan()
        await successor_lifespan.__aenter__()
        asyncio.get_running_loop().call_later(0.3, release.set)
    assert led_at_the_end == [True]
    await eventually(lambda: successor.is_leader, "the hand-over")
    await successor_lifespan.__aexit__(None, None, None)


async def test_no_further_tick_begins_while_a_stopping_worker_waits_for_its_running_jobs(database: str) -> None:
    started, release, ticks = asyncio.Event(), asyncio.Event(), []
    scheduler = AsyncIOScheduler(timezone="UTC")

    async def slow() -> None:
        started.set()
        await release.wait()

    async def tick() -> None:
        ticks.append(current_run().scheduled_for)

    scheduler.add_job(slow, id="slow")
    scheduler.add_job(tick, "interval", seconds=0.05, id="tick")
    async with Singleton(scheduler, database, drain=30).lifespan():
        await eventually(lambda: started.is_set() and ticks, "the jobs' start")
        leaving = datetime.now(UTC)
        asyncio.get_running_loop().call_later(0.5, release.set)
    assert max(ticks) <= leaving


async def test_a_disabled_singleton_does_nothing_and_says_so() -> None:
    scheduler = AsyncIOScheduler()
    singleton = Singleton(scheduler, "postgresql://localhost/app", enabled=False)
    async with singleton.lifespan():
        assert not singleton.is_leader
        assert "disabled" in (await singleton.status()).problems[0]
        assert not scheduler.running


async def test_a_job_added_on_a_standby_is_said_to_wait(database: str, caplog: Any) -> None:
    leader, scheduler = Singleton(url=database), AsyncIOScheduler()
    standby = Singleton(scheduler, database, lease=2)
    async with leader.lifespan():
        await eventually(lambda: leader.is_leader, "an election")
        async with standby.lifespan():
            scheduler.add_job(print, "interval", hours=1)
            await eventually(lambda: "does not lead" in caplog.text, "the warning")


@pytest.mark.parametrize("before", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
async def test_asking_for_runs_at_the_edge_of_time_costs_nobody_the_leadership(store: RealStore, before: str) -> None:
    singleton = Singleton(url=store.url)
    async with singleton.lifespan():
        await eventually(lambda: singleton.is_leader, "an election")
        assert await singleton.runs("job", before=datetime.fromisoformat(before)) == []
        assert singleton.is_leader


async def test_readers_that_leave_or_come_in_crowds_cost_nobody_the_leadership(store: RealStore) -> None:
    singleton = Singleton(url=store.url, lease=1.0)
    async with singleton.lifespan():
        await eventually(lambda: singleton.is_leader, "an election")
        term = singleton.term
        readers = [asyncio.create_task(singleton.runs("job", limit=500)) for _ in range(400)]
        await asyncio.sleep(0.001)
        for reader in readers[::2]:
            reader.cancel()
        await asyncio.wait(readers)
        assert all(reader.cancelled() for reader in readers[::2])
        assert [reader.result() for reader in readers[1::2]] == [[]] * 200
        assert singleton.term == term
