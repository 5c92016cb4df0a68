"""Four real gunicorn workers on a real PostgreSQL: killed, frozen, cut off, reloaded, restarted."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg
import pytest

from example_app.embedded import EmbeddedPostgres
from example_app.server import Gunicorn

LEASE = 2.0
PATH = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}


@pytest.fixture
def server(database: str) -> Iterator[Gunicorn]:
    with Gunicorn(database, lease=LEASE) as gunicorn:
        gunicorn.leader()
        gunicorn.wait_for(lambda s: len(s["workers"]) == 4, "four workers")
        yield gunicorn


def leaders(server: Gunicorn, requests: int) -> Counter[Any]:
    """Who the workers name as leader; each request is a new connection, so that any of them may answer."""
    return Counter(server.status()["leader"] and server.status()["leader"]["worker"] for _ in range(requests))


def runs(server: Gunicorn, job: str = "pulse") -> list[tuple[str, int]]:
    """Second and worker of each run in the log."""
    return [
        (when, int(pid))
        for when, pid in re.findall(rf"^(\S+) \[\d+\] ran {job} in worker (\d+)", server.log.read_text(), re.MULTILINE)
    ]


def wait_for_runs(server: Gunicorn, pid: int, count: int = 2) -> None:
    server.wait_for(lambda _: sum(p == pid for _, p in runs(server)) >= count, f"runs in worker {pid}")


async def query(url: str, sql: str, *arguments: Any) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(sql, *arguments)
    finally:
        await connection.close()


def test_every_worker_names_the_same_leader_and_only_that_one_runs_the_jobs(server: Gunicorn) -> None:
    leader = server.leader()
    assert leaders(server, 200).keys() == {leader["worker"]}
    assert len({server.status()["answered_by"] for _ in range(100)}) > 1
    server.wait_for(lambda _: len(runs(server)) >= 3, "three runs")
    assert {pid for _, pid in runs(server)} == {leader["pid"]}
    assert max(Counter(when for when, _ in runs(server)).values()) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_another_worker_leads_and_runs_when_the_leader_ends(server: Gunicorn, how: signal.Signals) -> None:
    old = server.leader()
    os.kill(old["pid"], how)
    new = server.leader(other_than=old["worker"])
    assert new["token"] > old["token"]
    wait_for_runs(server, new["pid"])


def test_a_killed_bystander_changes_nothing(server: Gunicorn) -> None:
    old = server.leader()
    bystander = next(pid for pid in server.children() if pid != old["pid"])
    os.kill(bystander, signal.SIGKILL)
    server.wait_for(lambda s: bystander not in {w["pid"] for w in s["workers"]}, "the dead worker's disappearance")
    assert server.leader()["token"] == old["token"]


def test_a_frozen_leader_is_replaced_and_runs_nothing_on_waking(server: Gunicorn) -> None:
    old = server.leader()
    os.kill(old["pid"], signal.SIGSTOP)
    new = server.leader(other_than=old["worker"])
    wait_for_runs(server, new["pid"])
    before = len([pid for _, pid in runs(server) if pid == old["pid"]])
    os.kill(old["pid"], signal.SIGCONT)
    woken = server.wait_for(lambda s: s["answered_by"] == old["worker"], "an answer of the woken worker")
    assert woken["leader"] is None or woken["leader"]["worker"] != old["worker"]
    count = len(runs(server))
    server.wait_for(lambda _: len(runs(server)) >= count + 2, "two more runs")
    assert len([pid for _, pid in runs(server) if pid == old["pid"]]) == before
    server.wait_for(lambda s: {w["worker"] for w in s["workers"]} >= {old["worker"]}, "its return as a standby")


def test_a_leader_frozen_while_its_statement_waits_is_replaced(server: Gunicorn, database: str) -> None:
    old = server.leader()

    async def freeze_in_the_wait() -> None:
        connection = await asyncpg.connect(database)
        try:
            async with connection.transaction():
                await connection.execute("LOCK TABLE fastapi_singleton.term")
                for _ in range(3000):
                    waiting = await connection.fetchval(
                        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE $1",
                        f"fastapi_singleton:{old['pid']}:%",
                    )
                    if waiting:
                        os.kill(old["pid"], signal.SIGSTOP)
                        return
                    await asyncio.sleep(0.01)
                raise AssertionError("the leader's renewal never waited")
        finally:
            await connection.close()

    asyncio.run(freeze_in_the_wait())
    server.leader(other_than=old["worker"])
    os.kill(old["pid"], signal.SIGCONT)


def test_a_reload_ends_with_one_leader_among_new_workers(server: Gunicorn) -> None:
    old = set(server.children())
    os.kill(server.pid, signal.SIGHUP)
    status = server.wait_for(
        lambda s: s["leader"] is not None and not old & {w["pid"] for w in s["workers"]} and len(s["workers"]) == 4,
        "four new workers",
    )
    assert leaders(server, 20).keys() == {status["leader"]["worker"]}
    wait_for_runs(server, status["leader"]["pid"])


def test_a_leader_whose_session_is_cut_gives_way_at_once(server: Gunicorn, database: str) -> None:
    old = server.leader()
    cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE $1"
    assert asyncio.run(query(database, cut, f"fastapi_singleton:{old['pid']}:%")) == 1
    server.wait_for(lambda s: s["leader"] and s["leader"]["token"] > old["token"], "a new term")
    server.wait_for(lambda s: len(s["workers"]) == 4 and s["status"] == "ok", "all workers' return")


def test_one_connection_per_worker_and_none_for_requests(server: Gunicorn, database: str) -> None:
    leaders(server, 20)
    count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    assert asyncio.run(query(database, count)) == 4


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
def test_the_application_serves_while_postgresql_is_away_and_leads_again_after(
    own_server: EmbeddedPostgres, how: signal.Signals
) -> None:
    with Gunicorn(own_server.url, lease=LEASE) as server:
        old = server.leader()
        own_server.stop(how)
        server.wait_for(lambda s: not s["backend"]["reachable"] and s["leader"] is None, "the store's absence")
        answers = [server.status() for _ in range(200)]  # each with 200 OK, or it would be an error
        assert len({answer["answered_by"] for answer in answers}) > 1
        assert {answer["leader"] and answer["leader"]["worker"] for answer in answers} <= {None, old["worker"]}
        own_server.start()
        new = server.wait_for(lambda s: s["leader"] and s["leader"]["token"] > old["token"], "a new term")
        wait_for_runs(server, new["leader"]["pid"])


def test_postgresql_down_at_the_start_keeps_no_worker_from_serving(own_server: EmbeddedPostgres) -> None:
    own_server.stop()
    with Gunicorn(own_server.url, lease=LEASE) as server:
        status = server.wait_for(lambda s: s["status"] == "degraded", "a status without a store")
        assert status["problems"]
        assert server.get("/")["leads"] is False
        own_server.start()
        server.leader()


@contextmanager
def namespace() -> Iterator[tuple[str, str, str]]:
    """A network namespace with one wire to here: its name, our address on it, its address."""
    name = f"fs{uuid.uuid4().hex[:6]}"
    # Numbered after this process, so that two runs of the suite do not meet.
    here, there = (f"10.213.{os.getpid() % 256}.{host}" for host in (1, 2))

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, env=PATH)

    ip("netns", "add", name)
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "wire", "netns", name)
        ip("addr", "add", f"{here}/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", f"{there}/30", "dev", "wire")
        ip("-n", name, "link", "set", "wire", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name, here, there
    finally:
        subprocess.run(["ip", "link", "del", name], env=PATH, check=False, stderr=subprocess.DEVNULL)
        ip("netns", "del", name)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip", path=PATH["PATH"]) or not shutil.which("iptables", path=PATH["PATH"]),
    reason="a network partition needs root, iproute2 and iptables",
)
def test_a_leader_behind_a_cut_network_is_replaced_and_stops_by_itself() -> None:
    with namespace() as (name, here, there), EmbeddedPostgres(host=here) as postgres:
        postgres.allow(f"{there}/30")
        inside = ("ip", "netns", "exec", name)
        far = Gunicorn(postgres.url, lease=LEASE, workers=1, prefix=inside)
        with far, Gunicorn(postgres.url, lease=LEASE, workers=2) as near:
            # Not known which of them is elected first; the near ones stop and start until it is the far one.
            deadline = time.monotonic() + 60
            while near.leader()["pid"] not in far.children():
                assert time.monotonic() < deadline
                near.stop()
                near.start()
            far_pids = set(far.children())
            for chain, side in (("INPUT", "-i"), ("OUTPUT", "-o")):
                subprocess.run([*inside, "iptables", "-A", chain, side, "wire", "-j", "DROP"], check=True, env=PATH)
            new = near.wait_for(
                lambda s: s["leader"] and s["leader"]["pid"] not in far_pids, "a near worker's election"
            )
            assert "Lost the leadership" in far.log.read_text()
            before = runs(far)
            wait_for_runs(near, new["leader"]["pid"])
            assert runs(far) == before
