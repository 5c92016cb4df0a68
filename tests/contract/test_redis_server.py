"""Redis servers as they come: those that are refused, those that fail, and how they are named."""

import asyncio
import logging
import signal
import sys
from datetime import timedelta
from typing import Any

import pytest
import redis
from redis.asyncio.connection import Connection

from example_app.embedded_redis import EmbeddedRedis
from example_app.ports import free_port
from fastapi_singleton.backends import redis as package
from fastapi_singleton.backends.redis import RedisStore, server, session
from fastapi_singleton.errors import ConfigurationError, StoreError, UnsafeStoreError
from fastapi_singleton.records import Ending, Entry, Run, Verdict

from ..conftest import eventually
from ..leading import leading
from ..stores.redis import RealRedis
from .test_ledger import NOW, claim, judged, token
from .test_redis import Open, elected, worker

__all__ = ["worker"]


def raw(url: str) -> Any:
    return redis.Redis.from_url(url, decode_responses=True)


# -- refused -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random", "volatile-lru", "volatile-ttl"])
async def test_a_server_that_may_evict_keys_is_refused(worker: Open, redis_store: RealRedis, policy: str) -> None:
    redis_store.client.config_set("maxmemory-policy", policy)
    try:
        with pytest.raises(UnsafeStoreError, match=f"{policy}.*noeviction"):
            await worker().acquire()
        redis_store.client.config_set("maxmemory-policy", "noeviction")
        await elected(worker())
    finally:
        redis_store.client.config_set("maxmemory-policy", "noeviction")


async def test_a_replica_is_refused_and_a_leader_whose_server_becomes_one_has_lost(
    worker: Open, redis_store: RealRedis
) -> None:
    with EmbeddedRedis() as primary:
        leader = worker(primary.url)
        term = await elected(leader)
        with raw(primary.url) as client:
            client.replicaof("127.0.0.1", redis_store.client.connection_pool.connection_kwargs["port"])
        with pytest.raises(UnsafeStoreError, match="replica"):
            await leader.renew(term)
        with pytest.raises(UnsafeStoreError, match="replica"):
            await worker(primary.url).acquire()


def test_a_server_older_than_its_scripts_need_is_refused() -> None:
    store = RedisStore.parse("redis://localhost")
    for version in ("5.0.14", "6.0.16"):
        with pytest.raises(UnsafeStoreError, match="too old"):
            server.check(store, {"redis_version": version, "role": "master", "maxmemory_policy": "noeviction"})
    with pytest.raises(UnsafeStoreError, match="unknown"):
        server.check(store, {"redis_version": "7.2.4", "role": "master"})


async def test_a_server_without_an_append_only_file_is_taken_and_said_so_once(
    worker: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedRedis(settings={"appendonly": "no"}) as forgetful, caplog.at_level(logging.WARNING):
        backend = worker(forgetful.url)
        await elected(backend)
        backend.forfeit()
        await elected(backend)
        assert backend._store.detail.endswith(f":{forgetful.port}/0, without AOF")
        assert [record.levelname for record in caplog.records if "append-only" in record.getMessage()] == ["WARNING"]
        assert ("warning", "set appendonly yes.") in [(level, hint) for level, _, hint in await backend.examine()]


@pytest.mark.parametrize("problem", ["wrong password", "no password", "nobody there"])
async def test_a_store_that_is_away_is_told_from_an_unsafe_one_and_shows_no_password(
    worker: Open, problem: str
) -> None:
    with EmbeddedRedis(settings={"requirepass": "s3cr3t"}) as guarded:
        url = {
            "wrong password": f"redis://:s3cr3t-not@127.0.0.1:{guarded.port}/0",
            "no password": guarded.url,
            "nobody there": f"redis://:s3cr3t@127.0.0.1:{free_port()}/0",
        }[problem]
        with pytest.raises(StoreError) as caught:
            await worker(url).acquire()
        assert not isinstance(caught.value, UnsafeStoreError)
        assert "login" in str(caught.value) or "reached" in str(caught.value)
        assert "s3cr3t" not in str(caught.value)
        assert caught.value.__cause__ is None
        await elected(worker(f"redis://:s3cr3t@127.0.0.1:{guarded.port}/0"))


async def test_a_user_without_the_rights_is_told_which_and_one_without_the_channel_polls(
    worker: Open, redis_store: RealRedis, caplog: pytest.LogCaptureFixture
) -> None:
    port = redis_store.client.connection_pool.connection_kwargs["port"]
    acl = redis_store.client.execute_command
    url = f"redis://{{}}:s3cr3t@127.0.0.1:{port}/0"
    acl("ACL", "SETUSER", "narrow", "on", ">s3cr3t", "~other:*", "+@all")
    acl("ACL", "SETUSER", "deaf", "on", ">s3cr3t", "~fastapi_singleton:*", "resetchannels", "+@all")
    acl("ACL", "SETUSER", "enough", "on", ">s3cr3t", "~fastapi_singleton:*", "resetchannels",
        "&fastapi_singleton:*", "+@all", "-@dangerous", "+info")  # fmt: skip
    try:
        with pytest.raises(UnsafeStoreError, match="ACL SETUSER"):
            await worker(url.format("narrow")).acquire()
        for user in ("deaf", "enough"):
            backend = worker(url.format(user))
            await backend.release(await elected(backend))
        assert [r.levelname for r in caplog.records if "polling only" in r.getMessage()] == ["WARNING"]
    finally:
        for user in ("narrow", "deaf", "enough"):
            acl("ACL", "DELUSER", user)


# -- failing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_rows_and_tokens_survive_the_servers_restart(how: signal.Signals) -> None:
    with EmbeddedRedis() as own:
        async with leading(own.url, lease=2.0) as leader:
            await leader.elect()
            before = token(leader)
            entry, other = claim(leader), claim(leader, NOW - timedelta(seconds=1))
            assert await judged(leader, entry, other) == [Verdict.YOURS] * 2
            await leader.backend.finish([Ending(other, "succeeded", 1.0)])
            own.restart(how)
            assert await leader.ledger.enter(entry) is Verdict.YOURS  # sent again: it is the same claim
            assert [row.outcome for row in await leader.backend.runs("job", 10)] == ["running", "succeeded"]
            await leader.elect()
            assert token(leader) > before
            assert await judged(leader, claim(leader)) == [Verdict.TAKEN]


async def test_a_server_that_does_not_answer_ends_the_term_in_bounded_time(worker: Open) -> None:
    with EmbeddedRedis() as own:
        leader = worker(own.url, lease=1.0)
        term = await elected(leader)
        own.freeze()
        try:
            async with asyncio.timeout(2.0):
                with pytest.raises(StoreError, match="did not answer in time"):
                    await leader.renew(term)
                assert not await leader.renew(term)
                leader.forfeit()
        finally:
            own.thaw()
        await eventually(leader.acquire, "a new term")


async def test_a_server_out_of_memory_takes_no_claim_and_says_so(worker: Open, redis_store: RealRedis) -> None:
    backend = worker()
    term = await elected(backend)
    redis_store.client.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreError, match=r"no memory left.*maxmemory"):
            await backend.enter([Entry("contract", "job", NOW, token=term.token)])
    finally:
        redis_store.client.config_set("maxmemory", "0")
    assert await backend.runs("job", 10) == []


async def test_in_a_cluster_the_node_that_has_the_keys_is_asked(worker: Open) -> None:
    with (
        _node() as first,
        _node() as second,
        raw(first.url) as one,
        raw(second.url) as two,
    ):
        one.execute_command("CLUSTER MEET", "127.0.0.1", second.port)
        one.execute_command("CLUSTER ADDSLOTS", *range(8192))
        two.execute_command("CLUSTER ADDSLOTS", *range(8192, 16384))
        await eventually(lambda: _is_whole(one) and _is_whole(two), "the cluster")
        for node in (first, second):
            leader = worker(node.url)
            term = await elected(leader)
            assert await leader.enter([Entry("contract", node.url, NOW, token=term.token)]) == [Verdict.YOURS]
            await leader.release(term)
        assert sorted((one.dbsize() > 0, two.dbsize() > 0)) == [False, True]


def _node() -> EmbeddedRedis:
    return EmbeddedRedis(settings={"cluster-enabled": "yes"})


def _is_whole(client: Any) -> bool:
    return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


# -- naming --------------------------------------------------------------------------------------------------------------


async def test_a_socket_is_reached_by_its_path(worker: Open) -> None:
    own = EmbeddedRedis()
    path = own.settings["unixsocket"] = str(own.directory / "socket")
    with own:
        backend = worker(f"redis:///3?path={path}")
        await elected(backend)
        assert backend._store.detail == f"redis at {path}, database 3"


@pytest.mark.parametrize(
    ("url", "detail"),
    [
        ("redis://", "redis at localhost:6379/0"),
        ("redis://h", "redis at h:6379/0"),
        ("redis://u:p%40ss@h:1/2", "redis at h:1/2"),
        ("redis://:p@ss@h?db=4&socket_timeout=3&retry_on_timeout=yes", "redis at h:6379/4"),
        ("rediss://[::1]:7/?ssl_cert_reqs=none&password=hush", "redis at [::1]:7/0"),
    ],
)
def test_a_url_is_shown_without_its_secrets_and_tuned_by_nobody_else(url: str, detail: str) -> None:
    store = RedisStore.parse(url)
    assert store.detail == detail
    assert "p@ss" not in repr(store)
    assert "p@ss" not in store.redact(url.replace("%40", "@"))
    assert "hush" not in store.redact(url)
    connection = session.make_connection(store)
    assert (connection.socket_timeout, connection.retry._retries, connection.db) == (None, 0, int(detail[-1]))


@pytest.mark.parametrize(
    "url",
    [
        "redis://h/app", "redis://h:port/0", "redis://:s3cr3t/x@h/0", "redis://:s3cr3t#x@h/0", "redis://h/0?dbb=s3cr3t",
        "rediss://h/0?ssl_colour=s3cr3t", "rediss://h/0?ssl_cert_reqs=s3cr3t", "redis://h/-1", "rediss://h?path=/s",
    ],
)  # fmt: skip
def test_a_url_that_cannot_be_read_is_refused_at_once_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisStore.parse(url)
    assert "s3cr3t" not in str(caught.value)


def test_a_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, session.__name__)
    monkeypatch.delattr(package, "session")
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigurationError, match=r"fastapi-singleton-scheduler\[redis\]"):
        RedisStore.parse("redis://localhost")


async def test_the_fence_needs_postgresql() -> None:
    with pytest.raises(ConfigurationError, match="needs PostgreSQL"):
        await RedisStore.parse("redis://localhost").fence(None, "unit", Run("id", "job", NOW, 1, 1, "nonce"))


def test_the_private_names_of_the_driver_that_a_session_needs_are_there() -> None:
    connection = Connection()
    assert (connection._reader, connection._writer) == (None, None)
    connection._close()  # type: ignore[no-untyped-call]
