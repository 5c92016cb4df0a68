"""The doctor on stores that are not well: each finding says what to do, and no secret."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from example_app.embedded import EmbeddedPostgres
from fastapi_singleton import Singleton
from fastapi_singleton.backends import find_store
from fastapi_singleton.doctor import Finding, examine
from fastapi_singleton.records import Worker
from fastapi_singleton.timing import Timing

from ..conftest import eventually
from ..stores import RealStore
from ..stores.limits import PGBOUNCER, pgbouncer, plain_role
from ..stores.redis import RealRedis


async def diagnosis(url: str, level: str) -> Finding:
    """The one finding of that level."""
    findings = await examine(find_store(url, None), "default")
    [found] = [finding for finding in findings if finding.level == level]
    assert found.hint
    return found


@contextmanager
def configured(real: RealRedis, setting: str, value: str) -> Iterator[None]:
    before = real.client.config_get(setting)[setting]
    real.client.config_set(setting, value)
    try:
        yield
    finally:
        real.client.config_set(setting, before)


async def test_a_server_that_evicts_keys(redis_store: RealRedis) -> None:
    with configured(redis_store, "maxmemory-policy", "allkeys-lru"):
        found = await diagnosis(redis_store.url, "problem")
    assert "allkeys-lru" in found.text
    assert "noeviction" in found.hint


@pytest.mark.parametrize(("setting", "value"), [("appendonly", "no"), ("appendfsync", "everysec")])
async def test_a_server_that_forgets_when_it_dies(redis_store: RealRedis, setting: str, value: str) -> None:
    with configured(redis_store, setting, value):
        found = await diagnosis(redis_store.url, "warning")
    assert "append" in found.text
    assert setting in found.hint


async def test_a_role_without_rights(database: str, admin: Any) -> None:
    async with plain_role(database, admin) as (_, url):
        found = await diagnosis(url, "problem")
    assert "fastapi-singleton schema" in found.hint


@pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed (Debian: apt-get install pgbouncer)")
async def test_a_transaction_pooler(database: str) -> None:
    async with pgbouncer(database, "transaction") as url:
        found = await diagnosis(url, "problem")
    assert "pooler" in found.text


async def test_a_replica(own_server: EmbeddedPostgres) -> None:
    with EmbeddedPostgres.replica_of(own_server) as replica:
        found = await diagnosis(replica.url, "problem")
    assert "replica" in found.text


async def test_a_server_that_is_away(own_server: EmbeddedPostgres) -> None:
    own_server.stop()
    found = await diagnosis(own_server.url, "problem")
    assert "cannot be reached" in found.text


async def test_few_connections_left(own_server: EmbeddedPostgres) -> None:
    worker = find_store(own_server.url, None).open("default", Worker.here(), Timing(10.0))
    await worker.connect()  # makes the tables
    await worker.close()
    connections = [await asyncpg.connect(own_server.url) for _ in range(180)]
    try:
        found = await diagnosis(own_server.url, "warning")
    finally:
        await asyncio.gather(*(connection.close() for connection in connections))
    assert "connections" in found.text
    assert "max_connections" in found.hint


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite3").write_bytes(b"this is not a database" * 100)
    found = await diagnosis(f"sqlite:///{tmp_path}/store.sqlite3", "problem")
    assert "store.sqlite3" in found.text


async def test_a_clock_that_is_off(store: RealStore, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = find_store(store.url, None).open("default", Worker.here(), Timing(10.0))
    await opened.attend()
    await opened.close()
    backend: Any = type(opened)
    now = backend.now
    monkeypatch.setattr(backend, "now", lambda self: now(self) + timedelta(seconds=7))
    found = await diagnosis(store.url, "warning")
    assert "7.0" in found.text or "6.9" in found.text
    assert "behind the store" in found.text


async def test_two_distributions_that_claim_the_import_name(store: RealStore, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = {"fastapi_singleton": ["fastapi-singleton", "fastapi-singleton-scheduler"]}
    monkeypatch.setattr("fastapi_singleton.doctor.packages_distributions", lambda: claims)
    found = await diagnosis(store.url, "problem")
    assert "fastapi-singleton and fastapi-singleton-scheduler" in found.text


@pytest.mark.parametrize("mode", ["leader", "race"])
async def test_a_fleet_at_work_is_healthy(store: RealStore, mode: str) -> None:
    singleton = Singleton(AsyncIOScheduler(), store.url, mode=mode)
    async with singleton.lifespan():

        async def shown() -> Any:
            return (await singleton.status()).workers and singleton.is_leader is (mode == "leader")

        await eventually(shown, "the worker")
        findings = await examine(find_store(store.url, None), "default")
    assert {finding.level for finding in findings} == {"ok"}, findings
    assert any("1 worker(s)" in finding.text for finding in findings)
