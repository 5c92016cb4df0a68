"""Fail-over times and costs at rest: a real PostgreSQL, four real gunicorn workers, real signals, a real cut line; and
the leader killed on the other stores.

Each acquisition is timed by the store, each fault by this process. Both run on this machine, hence on one clock, so
that no figure depends on how often somebody looked. `python -m benchmarks.failover [--quick]`
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg

from example_app.embedded_redis import EmbeddedRedis

from .table import Row, table

with warnings.catch_warnings():
    # The embedded server's package looks for a runtime directory that it is never asked to use.
    warnings.simplefilter("ignore")
    from example_app.embedded import EmbeddedPostgres
    from example_app.server import Gunicorn

WORKERS = 4
SHORT_LEASE = 2.0
GRACE = 1.5
READS = 200
REST = 10.0

# The successor overwrites the row of the term, so the two times of a hand-over meet only in a trigger.
AUDIT = (
    "CREATE TABLE handover (token bigint PRIMARY KEY, released_at timestamptz, acquired_at timestamptz)",
    """CREATE FUNCTION note_handover() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.handover VALUES (NEW.token, OLD.released_at, clock_timestamp());
        RETURN NULL;
    END $$""",
    """CREATE TRIGGER handover AFTER UPDATE ON fastapi_singleton.term
    FOR EACH ROW WHEN (NEW.token <> OLD.token) EXECUTE FUNCTION note_handover()""",
)
HANDOVERS = """
SELECT extract(epoch FROM acquired_at - released_at)::float8 AS seconds FROM handover WHERE released_at IS NOT NULL
"""
CONNECTIONS = "SELECT count(*) AS n FROM pg_stat_activity WHERE application_name LIKE 'fastapi\\_singleton%'"
COMMITS = "SELECT xact_commit AS n FROM pg_stat_database WHERE datname = 'postgres'"


class NotPossible(Exception):
    """This machine does not allow the measurement; the text says why."""


def killed(store: EmbeddedPostgres, quick: bool) -> Iterator[Row]:
    with Gunicorn(store.url, workers=WORKERS) as server:
        times = [fail_over(server, signal.SIGKILL) for _ in range(5 if quick else 20)]
    yield Row(f"leader SIGKILLed, {rounds(times)}", milliseconds(times), "median ≤ 50 ms, max ≤ 1.5 s")


def killed_elsewhere(_: EmbeddedPostgres, quick: bool) -> Iterator[Row]:
    with EmbeddedRedis() as redis, tempfile.TemporaryDirectory() as directory:
        for kind, url in (("Redis", redis.url), ("SQLite", f"sqlite:///{directory}/store.sqlite3")):
            with Gunicorn(url, workers=WORKERS) as server:
                times = [fail_over(server, signal.SIGKILL) for _ in range(5 if quick else 20)]
            what = f"leader SIGKILLed on {kind}, {rounds(times)}"
            yield Row(what, milliseconds(times), "median ≤ 100 ms, max ≤ 1 s")


def terminated(store: EmbeddedPostgres, quick: bool) -> Iterator[Row]:
    """From the release, not from the signal: before it, the leaving worker rightly waits for its running jobs."""
    with Gunicorn(store.url, workers=WORKERS) as server:
        settled(server)
        for statement in AUDIT:
            ask(store.url, statement)
        asked = [fail_over(server, signal.SIGTERM) for _ in range(5 if quick else 20)]
        times = [row["seconds"] for row in ask(store.url, HANDOVERS)]
    if len(times) != len(asked):
        raise AssertionError(f"{len(asked)} leaders were asked to leave, {len(times)} released the leadership")
    yield Row(f"leader SIGTERMed, {rounds(times)}", milliseconds(times), "within 50 ms of the release")


def frozen(store: EmbeddedPostgres, quick: bool) -> Iterator[Row]:
    with Gunicorn(store.url, workers=WORKERS, lease=SHORT_LEASE) as server:
        times = [fail_over(server, signal.SIGSTOP) for _ in range(2 if quick else 5)]
    yield Row(f"leader SIGSTOPped, {rounds(times)}", *against_lease(times))


def partitioned(_: EmbeddedPostgres, quick: bool) -> Iterator[Row]:
    what = "leader cut off from the store"
    try:
        times = [cut_off() for _ in range(1 if quick else 2)]
    except NotPossible as reason:
        yield Row(what, f"skipped: {reason}")
    else:
        yield Row(f"{what}, {rounds(times)}", *against_lease(times))


def at_rest(store: EmbeddedPostgres, quick: bool) -> Iterator[Row]:
    # Asked from another database, so that the questions are not among the transactions they count.
    aside = store.url.removesuffix("postgres") + "template1"
    with Gunicorn(store.url, workers=WORKERS) as server:
        settled(server)
        time.sleep(5)  # the server counts a session's transactions late: those of starting up must be through
        [connections] = ask(aside, CONNECTIONS)
        [before] = ask(aside, COMMITS)
        time.sleep(REST)
        [after] = ask(aside, COMMITS)
        times, leaders = [], set()
        for _ in range(READS):
            began = time.perf_counter()
            status = server.status()
            times.append(time.perf_counter() - began)
            leaders.add(status["leader"] and status["leader"]["worker"])
    p99 = statistics.quantiles(times, n=100)[98]
    named = "one and the same leader" if len(leaders) == 1 and None not in leaders else f"{len(leaders)} answers"
    yield Row("connections per worker", f"{connections['n'] / WORKERS:g}", "1 connection per worker")
    yield Row(f"queries at rest, {WORKERS} workers together", f"{(after['n'] - before['n']) / REST:.1f} per second")
    yield Row(
        f"GET /scheduler/status, {READS} times",
        f"p50 {statistics.median(times) * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, worst {max(times) * 1e3:.1f} ms",
    )
    yield Row(f"leader named by those {READS}", named, "one and the same leader")


def running(store: EmbeddedPostgres, quick: bool) -> Iterator[Row]:
    """What it is all for. The window opens half-way between two ticks: no tick lies on its edge."""
    seconds = 20 if quick else 60
    with Gunicorn(store.url, workers=WORKERS) as server:
        settled(server)
        time.sleep(1 + (0.5 - time.time()) % 1)
        start = server.log.stat().st_size
        time.sleep(seconds)
        runs = server.log.read_bytes()[start:].count(b"ran pulse")
    yield Row(f"a job each second, {seconds} s", f"{runs} runs", f"{seconds} runs, not {seconds * WORKERS}")


def fail_over(server: Gunicorn, how: signal.Signals) -> float:
    """Seconds from the signal to the leader until another worker has acquired the leadership."""
    leader = settled(server)
    time.sleep(random.random())  # or the faults would keep step with the polls and renewals they interrupt
    at = time.time()
    os.kill(leader["pid"], how)
    seconds = succeeded(server, leader) - at
    if how is signal.SIGSTOP:
        os.kill(leader["pid"], signal.SIGCONT)
    else:
        # Until its master has buried it, it counts as one of the four.
        while leader["pid"] in server.children():
            time.sleep(0.01)
    return seconds


def cut_off() -> float:
    """Seconds from when the leader's packets vanish, both ways and unannounced, until a worker on this side leads."""
    with ExitStack() as stack:
        line = stack.enter_context(far_host())
        # A store of its own: it must listen where the far host can reach it, and let it in.
        store = EmbeddedPostgres(host=line.here)
        stack.push(store)
        store.initialise()
        with (store.data / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {line.here}/30 trust\n")
        store.start()
        far = Gunicorn(store.url, workers=WORKERS, lease=SHORT_LEASE, host=line.there, prefix=line.beyond)
        leader = settled(stack.enter_context(far))
        near = stack.enter_context(Gunicorn(store.url, workers=WORKERS, lease=SHORT_LEASE))
        near.wait_for(lambda s: pids(s) >= {*near.children(), *far.children()} and leads(s, far), "one fleet of both")
        time.sleep(random.random())
        at = time.time()
        for chain in ("INPUT", "OUTPUT"):
            run(*line.beyond, "iptables", "-w", "-A", chain, "-j", "DROP")
        acquired_at = succeeded(near, leader)
        near.wait_for(lambda s: leads(s, near), "a leader on this side")
        return acquired_at - at


def settled(server: Gunicorn) -> dict[str, Any]:
    """The leader, once all workers are there. Those that died are shown for a lease longer; they do not count."""
    status = server.wait_for(
        lambda s: len(server.children()) == WORKERS and pids(s) >= {*server.children()} and leads(s, server),
        f"{WORKERS} workers and a leader",
    )
    leader: dict[str, Any] = status["leader"]
    return leader


def succeeded(server: Gunicorn, leader: dict[str, Any]) -> float:
    """When the next term began. By its token: a worker that has not yet heard may name anybody from the past."""
    status = server.wait_for(
        lambda s: s["leader"] is not None and s["leader"]["token"] > leader["token"], "a successor"
    )
    return datetime.fromisoformat(status["leader"]["acquired_at"]).timestamp()


def pids(status: dict[str, Any]) -> set[int]:
    return {worker["pid"] for worker in status["workers"]}


def leads(status: dict[str, Any], server: Gunicorn) -> bool:
    return status["leader"] is not None and status["leader"]["pid"] in server.children()


class Line(NamedTuple):
    """A cable to another host, which is a network namespace of this one."""

    namespace: str
    here: str
    there: str

    @property
    def beyond(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)


@contextmanager
def far_host() -> Iterator[Line]:
    """Named and numbered after this process, so that two benchmarks do not meet."""
    if os.geteuid() != 0:
        raise NotPossible("a network namespace takes root")
    missing = [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]
    if missing:
        raise NotPossible(f"no {' and no '.join(missing)} on this machine")
    pid = os.getpid()
    line = Line(f"bench{pid}", f"10.213.{pid % 256}.1", f"10.213.{pid % 256}.2")
    near, far = f"bench{pid}a", f"bench{pid}b"
    try:
        try:
            run("ip", "netns", "add", line.namespace)
            run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", line.namespace)
            run("ip", "address", "add", f"{line.here}/30", "dev", near)
            run("ip", "link", "set", near, "up")
            run(*line.beyond, "ip", "address", "add", f"{line.there}/30", "dev", far)
            run(*line.beyond, "ip", "link", "set", far, "up")
            run(*line.beyond, "ip", "link", "set", "lo", "up")
            run(*line.beyond, "iptables", "-w", "-S")
        except subprocess.CalledProcessError as error:
            raise NotPossible(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
        yield line
    finally:
        # The link by name: with its namespace alone it would go some time later.
        for command in (("link", "delete", near), ("netns", "delete", line.namespace)):
            subprocess.run(("ip", *command), capture_output=True, check=False)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def ask(url: str, sql: str) -> list[Any]:
    async def answer() -> list[Any]:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetch(sql)
        finally:
            await connection.close()

    return asyncio.run(answer())


def rounds(times: list[float]) -> str:
    return "once" if len(times) == 1 else f"{len(times)} times"


def milliseconds(times: list[float]) -> str:
    return f"median {statistics.median(times) * 1e3:.1f} ms, max {max(times) * 1e3:.1f} ms"


def against_lease(times: list[float]) -> tuple[str, str]:
    measured = f"median {statistics.median(times):.2f} s, max {max(times):.2f} s (lease {SHORT_LEASE:g} s)"
    return measured, f"≤ lease + {GRACE:g} s = {SHORT_LEASE + GRACE:g} s"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover", description="Fail-over times and costs.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    quick: bool = parser.parse_args().quick
    # Ended from outside, it still takes its servers and its namespace away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows: list[Row] = []
    try:
        # Housekeeping of the server would be counted among the queries at rest.
        with EmbeddedPostgres(settings={"autovacuum": "off"}) as store:
            for section in (killed, killed_elsewhere, terminated, frozen, partitioned, at_rest, running):
                print(f"measuring: {section.__name__.replace('_', ' ')} …", file=sys.stderr, flush=True)
                rows.extend(section(store, quick))
    finally:
        # What was measured before something went wrong is worth showing too.
        print(table(rows))


if __name__ == "__main__":
    main()
