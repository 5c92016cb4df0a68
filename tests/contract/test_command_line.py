"""The command line against every store, as cron and operators use it."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from fastapi_singleton import Singleton

from ..conftest import eventually
from ..leading import leading
from ..stores import RealStore

COMMAND = (sys.executable, "-m", "fastapi_singleton")


def call(store: RealStore | None, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **({"FASTAPI_SINGLETON_URL": store.url} if store is not None else {})}
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=60, **options
    )


def start(store: RealStore, *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "FASTAPI_SINGLETON_URL": store.url}
    return subprocess.Popen(
        [*COMMAND, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_command_is_run_recorded_and_its_exit_code_passed_on(store: RealStore) -> None:
    script = "import os, sys; print(os.environ['FASTAPI_SINGLETON_RUN_ID'], os.environ['FASTAPI_SINGLETON_TOKEN']); sys.exit(3)"
    done = call(store, "run", "nightly", "--", sys.executable, "-c", script)
    assert done.returncode == 3, done.stderr
    run_id, token = done.stdout.split()
    [row] = json.loads(call(store, "runs", "nightly", "--json").stdout)
    assert (row["id"], row["outcome"], row["error"]) == (run_id, "failed", "exit code 3")
    assert int(token) > 0
    assert "nightly" in call(store, "runs").stdout
    assert call(store, "status").returncode == 0


def test_a_second_run_within_the_gap_names_the_first(store: RealStore) -> None:
    assert call(store, "run", "nightly", "--", "true").returncode == 0
    again = call(store, "run", "nightly", "--busy-exit-code", "75", "--", "false")
    assert again.returncode == 75
    assert "was run" in again.stderr
    [row] = json.loads(call(store, "runs", "nightly", "--json").stdout)
    assert row["id"] in again.stderr
    assert call(store, "run", "nightly", "--min-gap", "0", "--", "true").returncode == 0
    assert call(store, "run", "another", "--", "true").returncode == 0
    assert len(json.loads(call(store, "runs", "nightly", "--json").stdout)) == 2


def test_a_command_that_runs_elsewhere_is_not_run_and_its_holder_named(store: RealStore, tmp_path: Path) -> None:
    started = tmp_path / "started"
    first = start(store, "run", "nightly", "--", "sh", "-c", f"touch {started}; exec sleep 60")
    try:
        wait_for(started)
        second = call(store, "run", "nightly", "--", "touch", str(tmp_path / "second"))
        assert second.returncode == 0
        assert str(first.pid) in second.stderr
        assert not (tmp_path / "second").exists()
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 128 + signal.SIGTERM
        [row] = json.loads(call(store, "runs", "nightly", "--json").stdout)
        assert row["error"] == f"ended by signal {int(signal.SIGTERM)}"
    finally:
        first.kill()
        first.communicate()


def test_a_wrapper_that_is_killed_frees_the_name(store: RealStore, tmp_path: Path) -> None:
    started = tmp_path / "started"
    first = start(store, "run", "nightly", "--lease", "1", "--", "sh", "-c", f"touch {started}; exec sleep 2")
    wait_for(started)
    first.kill()
    first.communicate()
    second = call(store, "run", "nightly", "--lease", "1", "--min-gap", "0", "--wait", "30", "--", "true")
    assert second.returncode == 0
    assert second.stderr == ""
    # Nobody leads a fleet of cron lines: whoever comes next, for whatever, gives up what was cut short.
    deadline = time.monotonic() + 30
    while json.loads(call(store, "runs", "nightly", "--json").stdout)[-1]["outcome"] == "running":
        assert time.monotonic() < deadline
        assert call(store, "run", "another", "--min-gap", "0", "--", "true").returncode == 0
    [row] = [
        row for row in json.loads(call(store, "runs", "nightly", "--json").stdout) if row["outcome"] != "succeeded"
    ]
    assert (row["outcome"], row["error"]) == ("abandoned", "its worker is gone")


@pytest.mark.parametrize("lease", ["1", "4"])  # the leader's own, and one of which a quarter is longer than that
async def test_a_leader_does_not_give_up_a_command_that_runs_and_gives_up_one_that_was_killed(
    store: RealStore, tmp_path: Path, lease: str
) -> None:
    started = tmp_path / "started"
    async with leading(store.url, name="default", lease=0.5) as leader:
        process = await asyncio.to_thread(
            start, store, "run", "nightly", "--lease", lease, "--", "sh", "-c", f"touch {started}; exec sleep 60"
        )
        try:
            await asyncio.to_thread(wait_for, started)
            term = await leader.elect()
            until = time.monotonic() + 2.5
            while time.monotonic() < until:  # longer than its lease
                assert await leader.backend.sweep(term) == 0
                assert await leader.backend.renew(term)
                await asyncio.sleep(0.1)
            process.kill()

            async def given_up() -> Any:
                assert await leader.backend.renew(term)
                return await leader.backend.sweep(term)

            assert await eventually(given_up, "the killed command's run") == 1
        finally:
            process.kill()
            process.communicate()


def test_of_many_that_start_together_one_runs_and_the_others_name_its_run(store: RealStore, tmp_path: Path) -> None:
    out = tmp_path / "ran"
    racing = [start(store, "run", "nightly", "--", "sh", "-c", f"echo x >> {out}") for _ in range(12)]
    said = [process.communicate(timeout=120)[1] for process in racing]
    assert [process.returncode for process in racing] == [0] * 12, said
    assert out.read_text() == "x\n"
    [row] = json.loads(call(store, "runs", "nightly", "--json").stdout)
    assert sum(row["id"] in errors for errors in said) == 11, said


def test_a_command_that_cannot_be_started_says_so(store: RealStore) -> None:
    done = call(store, "run", "nightly", "--", "/does/not/exist")
    assert done.returncode == 127
    assert "cannot be started" in done.stderr
    assert call(store, "run", "nightly").returncode == 2


@pytest.mark.parametrize("closed", ["stdout", "stderr", "all"])
def test_a_command_is_run_also_if_its_wrapper_was_given_no_output(store: RealStore, closed: str) -> None:
    redirected = {"stdout": ">&-", "stderr": "2>&-", "all": "<&- >&- 2>&-"}[closed]
    line = f"exec {sys.executable} -m fastapi_singleton run nightly -- sh -c 'exit 7' {redirected}"
    environment = {**os.environ, "FASTAPI_SINGLETON_URL": store.url}
    assert subprocess.run(["sh", "-c", line], env=environment, timeout=60, check=False).returncode == 7


def test_a_signal_that_is_to_be_ignored_is_not_passed_on(store: RealStore, tmp_path: Path) -> None:
    started = tmp_path / "started"
    line = f"trap '' HUP; exec {sys.executable} -m fastapi_singleton run nightly -- sh -c 'touch {started}; sleep 1; exit 7'"
    wrapper = subprocess.Popen(["sh", "-c", line], env={**os.environ, "FASTAPI_SINGLETON_URL": store.url})
    wait_for(started)
    wrapper.send_signal(signal.SIGHUP)
    assert wrapper.wait(30) == 7


async def test_status_shows_a_running_fleet_and_leaves_no_trace(store: RealStore) -> None:
    singleton = Singleton(url=store.url, name="shop", lease=2.0)
    async with singleton.lifespan():
        await eventually(lambda: singleton.is_leader, "an election")
        done = await asyncio.to_thread(call, store, "status", "--name", "shop", "--json")
        document = json.loads(done.stdout)
        assert document["leader"]["pid"] == os.getpid()
        assert len(document["workers"]) == 1
        shown = json.loads(json.dumps(dataclasses.asdict(await singleton.status()), default=str))
        assert set(document) == set(shown)
        assert {key: document[key] for key in ("status", "name", "mode", "backend")} == {
            "status": "ok", "name": "shop", "mode": "leader", "backend": shown["backend"],
        }  # fmt: skip
        assert str(os.getpid()) in (await asyncio.to_thread(call, store, "status", "--name", "shop")).stdout


async def test_status_shows_a_race(store: RealStore) -> None:
    singleton = Singleton(AsyncIOScheduler(), store.url, name="shop", mode="race")
    async with singleton.lifespan():

        async def headline() -> Any:
            said = (await asyncio.to_thread(call, store, "status", "--name", "shop")).stdout
            return said if "\nA race of 1 worker(s), without a leader\n" in said else None

        assert "racer" in str(await eventually(headline, "the race"))


def test_the_doctor_finds_a_healthy_store_healthy(store: RealStore) -> None:
    done = call(store, "doctor", "--json")
    assert done.returncode == 0, done.stdout
    levels = {finding["level"] for finding in json.loads(done.stdout)}
    assert "problem" not in levels
    assert call(store, "doctor").stdout.startswith("ok ")


@pytest.mark.parametrize("url", ["postgresql://someone:s3cr3t@127.0.0.1:1/app", "redis://:s3cr3t@127.0.0.1:1/0"])
def test_a_store_that_is_away_is_named_without_its_password(url: str) -> None:
    for command in (("status",), ("runs", "x"), ("run", "x", "--", "true"), ("doctor",)):
        done = call(None, *command[:1], "--url", url, *command[1:])
        assert done.returncode == (1 if command == ("doctor",) else 3)
        assert "Hint: " in done.stdout + done.stderr
        assert "s3cr3t" not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_wrong_usage_is_explained() -> None:
    assert call(None, "status", "--url", "mysql://x").returncode == 2
    assert call(None, "runs", "--limit", "0").returncode == 2
    assert "name the job" in call(None, "runs", "--limit", "51").stderr
    assert "needs no schema" in call(None, "schema", "--url", "redis://localhost").stderr
    assert call(None, "nonsense").returncode == 2
    assert "SCHEMA" in call(None, "schema", "--role", "app").stdout
    for asked in (["--help"], ["run", "--help"]):
        assert "Exit codes: 0 done" in " ".join(call(None, *asked).stdout.split())


def test_whoever_reads_may_stop_reading(store: RealStore) -> None:
    assert call(store, "run", "nightly", "--", "true").returncode == 0  # so that there is something to read
    shell = f"{' '.join(COMMAND)} status | true; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "FASTAPI_SINGLETON_URL": store.url}
    cut = subprocess.run(["bash", "-c", shell], env=environment, capture_output=True, text=True, check=True)
    assert cut.stderr == ""
    assert cut.stdout in ("141\n", "0\n")


@pytest.mark.parametrize("command", [("status",), ("status", "--json"), ("runs", "nightly", "--json"), ("doctor",)])
def test_whoever_merely_looks_makes_no_file(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = call(None, *command, "--url", f"sqlite:///{tmp_path}/mistyped.sqlite3")
    assert done.returncode == 0
    assert f"There is no {tmp_path}/mistyped.sqlite3" in done.stdout + done.stderr
    assert "Hint: " in done.stdout + done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("command", [("status",), ("runs", "nightly"), ("doctor",)])
async def test_whoever_merely_looks_makes_no_tables(database: str, admin: Any, command: tuple[str, ...]) -> None:
    done = await asyncio.to_thread(call, None, *command, "--url", database)
    assert done.returncode == 0
    assert "no worker has been here yet" in done.stdout + done.stderr
    assert await admin.fetchval("SELECT to_regnamespace('fastapi_singleton')") is None


def test_the_command_line_does_not_import_fastapi() -> None:
    script = "import sys, fastapi_singleton.cli, fastapi_singleton.wrapping; print('fastapi' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
