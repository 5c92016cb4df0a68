"""What is particular to SQLite: one host, one file, a lease by the boot's clock, and every reason to refuse or let go."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fastapi_singleton.backends import find_store
from fastapi_singleton.backends.sqlite import SqliteStore, database
from fastapi_singleton.backends.sqlite.backend import SqliteBackend
from fastapi_singleton.errors import ConfigurationError
from fastapi_singleton.guardian import Guardian
from fastapi_singleton.records import Entry, JobView, Run, Term, Verdict, Worker
from fastapi_singleton.timing import Timing
from fastapi_singleton.wrapping import Wrapped, run_guarded

from ..conftest import eventually
from ..stores.sqlite import LEADER, Open, RealSqlite, another_process, elected, open_workers

NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture
def real(tmp_path: Path) -> RealSqlite:
    return RealSqlite(tmp_path)


@pytest.fixture
async def worker(real: RealSqlite) -> AsyncIterator[Open]:
    async with open_workers(real.path) as open_one:
        yield open_one


# -- the address ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite", "sqlite+pysqlite"])
def test_a_relative_and_an_absolute_path_can_be_named(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (f"{scheme}:///app.sqlite3", f"{scheme}:///{tmp_path}/app.sqlite3?check_same_thread=false"):
        store = find_store(url, None)
        assert (store.kind, store.detail) == ("sqlite", str(tmp_path / "app.sqlite3"))
        store.open("contract", Worker.here(), Timing(10.0))
    assert list(tmp_path.iterdir()) == []  # nothing is made before the lifespan


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("sqlite://", "names no file"), ("sqlite:///", "names no file"), ("sqlite:///:memory:", "in memory"),
        ("sqlite:///file:x?mode=memory&uri=true", "names no file"), ("sqlite://host/x", "cannot be read"),
        ("sqlite:///x?vfs=unix-none", "vfs"), ("sqlite:////nowhere/at/all/x", "does not exist"),
        ("sqlite:////", "is a directory"), ("sqlite:////dev/null", "not a regular file"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_or_written_is_refused_at_construction(url: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        find_store(url, None)
    assert caught.value.hint


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs"])
def test_a_network_file_system_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a b")
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda rw\n"
        f"31 22 0:44 / {tmp_path}/a\\040b rw,relatime shared:1 - {kind} server:/x rw\n"
        f"32 22 0:45 / {tmp_path}/a rw - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr("fastapi_singleton.backends.sqlite.address.filesystem.__defaults__", (mountinfo,))
    for directory in ("a b", "link"):
        with pytest.raises(ConfigurationError, match="network file system"):
            SqliteStore.parse(f"sqlite:///{tmp_path}/{directory}/x")
    SqliteStore.parse(f"sqlite:///{tmp_path}/x")
    mountinfo.unlink()  # where the system does not tell, the user knows
    SqliteStore.parse(f"sqlite:///{tmp_path}/a b/x")


async def test_a_fence_needs_a_database_that_a_transaction_can_share(real: RealSqlite) -> None:
    with pytest.raises(ConfigurationError, match="needs PostgreSQL"):
        await SqliteStore.parse(real.url).fence(object(), "contract", Run("", "", NOW, 1, 1, ""))


# -- the lease -----------------------------------------------------------------------------------------------------------


def test_many_workers_meeting_an_empty_file_elect_exactly_one(real: RealSqlite) -> None:
    everybody = threading.Barrier(8)

    async def contend() -> Term | None:
        everybody.wait(30)
        backend = SqliteBackend(str(real.path), "contract", Worker.here(), Timing(10.0))
        try:
            return await backend.acquire()
        finally:
            everybody.wait(30)  # nobody leaves before all have asked
            await backend.close()

    with ThreadPoolExecutor(everybody.parties) as threads:
        terms = list(threads.map(asyncio.run, [contend() for _ in range(everybody.parties)]))
    assert sum(term is not None for term in terms) == 1


async def test_tokens_grow_with_every_term_and_a_release_keeps_them(worker: Open, real: RealSqlite) -> None:
    first, second = worker(), worker()
    tokens = [int(time.time() * 1000) - 1]  # never behind the clock, also where the file has lost its last writes
    for backend in (first, second, first, first):
        term = await elected(backend)
        assert await backend.renew(term)
        await backend.release(term)
        assert not await backend.renew(term)
        [row] = real.execute("SELECT token, released_at FROM fastapi_singleton_term")
        assert row["token"] == term.token
        assert row["released_at"] is not None
        tokens.append(term.token)
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("ahead", [10**15, -(10**12)])
async def test_a_token_exceeds_both_the_last_one_and_the_clock(worker: Open, real: RealSqlite, ahead: int) -> None:
    """The clock may have been set back, or the file be a copy of long ago."""
    backend = worker()
    term = await elected(backend)
    await backend.release(term)
    real.execute("UPDATE fastapi_singleton_term SET token = token + ?", ahead)
    again = await elected(backend)
    assert again.token == term.token + ahead + 1 if ahead > 0 else again.token >= term.token


async def test_a_live_holder_is_not_replaced_and_one_that_has_let_go_is(worker: Open) -> None:
    leader, standby = worker(), worker()
    term = await elected(leader)
    assert await standby.acquire() is None
    leader.forfeit()
    assert not await leader.renew(term)
    assert (await elected(leader)).token > term.token  # it need not wait for its own lease
    here = Worker.here()
    elsewhere = worker(replace(here, process=f"{here.process}0"))  # another process, which cannot look into this one
    leader.forfeit()
    assert await elsewhere.acquire() is None
    await leader.close()
    await elected(elsewhere)


async def test_a_lapsed_lease_is_not_renewed_back_and_still_claims_until_somebody_else_leads(worker: Open) -> None:
    leader, standby = worker(lease=0.4), worker()
    term = await elected(leader)
    await asyncio.sleep(0.5)
    entries = [Entry("contract", "job", NOW - timedelta(seconds=n), token=term.token) for n in range(2)]
    assert await leader.enter(entries[:1]) == [Verdict.YOURS]
    assert not await leader.renew(term)
    assert (await elected(standby)).token > term.token
    assert await leader.enter(entries[1:]) == [Verdict.LOST]


async def test_a_dead_leader_is_replaced_at_once_and_a_stopped_one_after_its_lease(
    worker: Open, real: RealSqlite
) -> None:
    standby = worker()
    with another_process(LEADER, real.url, "60") as leader:
        assert await standby.acquire() is None
        leader.kill()
        await asyncio.wait_for(standby.vacancy(50), 30)  # the operating system's word
        term = await elected(standby)
        await standby.release(term)
    with another_process(LEADER, real.url, "2") as leader:
        assert await standby.acquire() is None
        leader.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        await eventually(standby.acquire, "the end of the stopped leader's lease")
        assert 1.0 < time.monotonic() - stopped < 4.0
        leader.send_signal(signal.SIGCONT)
        assert leader.wait(30) == 0  # woken up, it finds that its term is over


async def test_the_next_boot_frees_the_lease_and_gives_up_the_runs(worker: Open) -> None:
    before = Worker.here()
    leader = worker(before)
    term = await elected(leader)
    assert await leader.enter([Entry("contract", "job", NOW, token=term.token)]) == [Verdict.YOURS]
    after = replace(Worker.here(), process="another-boot" + before.process[before.process.index("/") :])
    successor = worker(after)
    await successor.look()
    assert (successor.fleet.leader, successor.fleet.workers) == (None, ())
    newer = await elected(successor)
    assert newer.token > term.token
    assert await successor.sweep(newer) == 1
    assert not await leader.renew(term)


async def test_a_clock_that_started_anew_ends_the_lease_where_boots_have_no_id(worker: Open, real: RealSqlite) -> None:
    nameless = [worker(replace(Worker.here(), process="")) for _ in range(2)]
    await elected(nameless[0])
    assert await nameless[1].acquire() is None
    real.execute("UPDATE fastapi_singleton_term SET expires_after_boot = expires_after_boot + 1000000")
    await elected(nameless[1])


@pytest.mark.parametrize("step", [timedelta(days=400), timedelta(days=-400)])
async def test_a_step_of_the_wall_clock_changes_no_lease(
    worker: Open, monkeypatch: pytest.MonkeyPatch, step: timedelta
) -> None:
    leader, standby = worker(), worker()
    term = await elected(leader)
    assert await standby.acquire() is None
    assert await standby.enter([Entry("contract", "job", NOW, token=term.token)]) == [Verdict.YOURS]
    before = leader.now()
    monkeypatch.setattr("fastapi_singleton.backends.sqlite.database.wall_clock", lambda: datetime.now(UTC) + step)
    assert abs(leader.now() - before) < timedelta(minutes=1)  # it follows only where the store is asked
    assert await standby.acquire() is None
    assert await leader.renew(term)
    assert abs(leader.now() - before - step) < timedelta(minutes=1)
    assert await leader.sweep(term) == 0
    assert [w.role for w in leader.fleet.workers] == ["leader", "standby"]
    await leader.release(term)
    assert (await elected(standby)).token > term.token


async def test_a_release_wakes_a_standby_long_before_its_poll(worker: Open) -> None:
    leader, standby = worker(), worker()
    term = await elected(leader)
    assert await standby.acquire() is None
    waiting = asyncio.create_task(standby.vacancy(100))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await leader.release(term)
    await asyncio.wait_for(waiting, 30)
    await elected(standby)


async def test_every_worker_sees_the_same_fleet(worker: Open) -> None:
    leader, standby, visitor = worker(), worker(), worker()
    term = await elected(leader)
    assert await leader.renew(term, [JobView("nightly", "cron", None, True)])
    assert await standby.acquire() is None
    assert await leader.enter([Entry("contract", "nightly", NOW, token=term.token)]) == [Verdict.YOURS]
    assert await leader.renew(term)
    for look in (visitor.look, standby.acquire):
        await look()
    for backend in (leader, standby, visitor):
        fleet = backend.fleet
        assert fleet.leader is not None
        assert (fleet.leader.worker, fleet.leader.token) == (term.worker, term.token)
        assert [w.role for w in fleet.workers] == ["leader", "standby"]
        assert [(job.id, job.last_run) for job in fleet.jobs] == [("nightly", fleet.runs[0])]
    await standby.close()
    assert await leader.renew(term)
    assert len(leader.fleet.workers) == 1
    assert {level for level, _, _ in await visitor.examine()} <= {"ok", "warning"}


async def test_a_run_from_when_the_clock_was_ahead_does_not_stand_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = find_store(f"sqlite:///{tmp_path}/clock.sqlite3", None)
    wrapped = Wrapped("default", "nightly", ["true"], busy_exit_code=75)
    # There are threads here, so that nothing may be forked: somebody who does not listen stands for the guardian.
    sleeper = subprocess.Popen(["sleep", "300"])
    nobody = Guardian(sleeper.pid, os.open(os.devnull, os.O_WRONLY))
    with monkeypatch.context() as ahead:
        ahead.setattr(database, "wall_clock", lambda: datetime.now(UTC) + timedelta(days=365))
        assert await run_guarded(store, wrapped, nobody) == 0
        assert await run_guarded(store, wrapped, nobody) == 75
    assert await run_guarded(store, wrapped, nobody) == 0
    assert await run_guarded(store, wrapped, nobody) == 75
    nobody.dismiss()
    sleeper.wait()
