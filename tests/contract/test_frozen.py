"""Code that stands still at the worst moment: what it was about to do must not be done twice, nor go on without its lock."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastapi_singleton import LockHeldError, Singleton
from fastapi_singleton.ledger import Ledger

from ..conftest import eventually
from ..stores import RealStore
from ..stores.sqlite import RealSqlite

# The wrapper stops itself right before its claim (`enter`) or the ending of its run (`end`) is sent.
FROZEN = """
import os, signal, sys
from fastapi_singleton.ledger import Ledger

write = Ledger.STEP

def frozen(self, what):
    os.kill(os.getpid(), signal.SIGSTOP)
    return write(self, what)

Ledger.STEP = frozen
from fastapi_singleton.cli import main
sys.exit(main())
"""

KILLED_GUARDIAN = """
import os, signal
from fastapi_singleton.guardian import Guardian

fork = Guardian.fork

def killed():
    guardian = fork()
    os.kill(guardian._pid, signal.SIGKILL)
    return guardian

Guardian.fork = killed
"""


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


class Wrapper:
    """`fastapi-singleton run nightly` with a command that leaves a trace, and perhaps does not end by itself."""

    def __init__(self, store: RealStore, trace: Path, command: str, *, frozen: str = "") -> None:
        start = ["-c", FROZEN.replace("STEP", frozen)] if frozen else ["-m", "fastapi_singleton"]
        self.trace = trace
        self.process = subprocess.Popen(
            [sys.executable, *start, "run", "nightly", "--lease", "1", "--min-gap", "0", "--", "sh", "-c", command],
            env={**os.environ, "FASTAPI_SINGLETON_URL": store.url},
            stderr=subprocess.PIPE,
            text=True,
        )

    async def pids(self, count: int) -> list[int]:
        """The processes that have left their trace."""

        def told() -> Any:
            lines = self.trace.read_text().split() if self.trace.exists() else []
            return [int(line) for line in lines] if len(lines) >= count else None

        found: Any = await eventually(told, "the command's trace")
        return list(found)


@pytest.fixture
def wrappers(store: RealStore, tmp_path: Path) -> Iterator[Any]:
    made: list[Wrapper] = []

    def make(command: str, **options: Any) -> Wrapper:
        trace = tmp_path / f"trace{len(made)}"
        made.append(Wrapper(store, trace, command.replace("TRACE", str(trace)), **options))
        return made[-1]

    yield make
    for wrapper in made:
        wrapper.process.kill()
        for pid in wrapper.trace.read_text().split() if wrapper.trace.exists() else []:
            if state(int(pid)) != "X":
                os.kill(int(pid), signal.SIGKILL)
        wrapper.process.wait()
        assert wrapper.process.stderr is not None
        wrapper.process.stderr.close()


async def test_once_is_once_though_a_caller_stood_still_between_looking_and_claiming(
    store: RealStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    ready, go_on = threading.Event(), threading.Event()
    enter, here = Ledger.enter, threading.current_thread()

    def stand_still(self: Ledger, entry: Any) -> Any:
        if threading.current_thread() is not here and not ready.is_set():
            ready.set()
            go_on.wait(60)  # the whole loop of that thread: nothing is renewed
        return enter(self, entry)

    monkeypatch.setattr(Ledger, "enter", stand_still)
    # With a lease each of its own: on SQLite, workers of one process would know each other's.
    frozen = asyncio.create_task(
        asyncio.to_thread(
            lambda: asyncio.run(Singleton(url=store.url, lease=1.0).once("import", lambda: ran.append("frozen")))
        )
    )
    await eventually(ready.is_set, "the moment before the claim")

    async def other() -> bool:
        return await Singleton(url=store.url, lease=1.0).once("import", lambda: ran.append("other"))

    assert await eventually(other, "the end of the lease")
    go_on.set()
    assert await frozen is False
    assert ran == ["other"]
    assert not await other()


async def test_a_claim_taken_back_does_not_use_up_the_key(store: RealStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    enter, stood_still = Ledger.enter, False

    async def stand_still(self: Ledger, entry: Any) -> Any:
        nonlocal stood_still
        verdict = await enter(self, entry)
        if not stood_still:
            stood_still = True
            time.sleep(1.2)  # longer than its lease, and nobody else asks
        return verdict

    monkeypatch.setattr(Ledger, "enter", stand_still)
    assert await Singleton(url=store.url, lease=1.0).once("import", lambda: ran.append("here"))
    assert ran == ["here"]


async def test_a_caller_that_is_cancelled_while_its_claim_is_answered_does_not_use_up_the_key(
    store: RealStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    enter = Ledger.enter

    def cancelled(self: Ledger, entry: Any) -> Any:
        answer = enter(self, entry)
        asyncio.get_running_loop().call_soon(caller.cancel)  # the claim is on its way
        return answer

    singleton = Singleton(url=store.url, lease=2.0)
    with monkeypatch.context() as once:
        once.setattr(Ledger, "enter", cancelled)
        caller = asyncio.create_task(singleton.once("import", lambda: ran.append("cancelled")))
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert await singleton.once("import", lambda: ran.append("next"))
    assert ran == ["next"]


async def test_what_the_function_of_once_raises_comes_through(store: RealStore) -> None:
    def fail() -> None:
        raise LockHeldError("something else", None)

    with pytest.raises(LockHeldError, match="something else"):
        await Singleton(url=store.url, lease=2.0).once("import", fail)


async def test_a_command_is_not_run_by_a_wrapper_that_stood_still_before_its_claim(
    store: RealStore, wrappers: Any
) -> None:
    frozen = wrappers("echo $$ > TRACE", frozen="enter")
    await eventually(lambda: state(frozen.process.pid) == "T", "that it stands still")

    async def other_runs() -> bool:
        other = wrappers("echo $$ > TRACE")
        await asyncio.to_thread(other.process.wait, 60)
        return bool(other.trace.exists())

    await eventually(other_runs, "the other's run")
    frozen.process.send_signal(signal.SIGCONT)
    _, said = await asyncio.to_thread(frozen.process.communicate)
    assert "the lock was lost before nightly began" in said
    assert not frozen.trace.exists()


async def test_a_command_and_what_it_has_started_do_not_outlive_the_lock(store: RealStore, wrappers: Any) -> None:
    wrapper = wrappers("trap '' TERM; echo $$ >> TRACE; sh -c 'echo $$ >> TRACE; exec sleep 300'; echo done")
    pids = await wrapper.pids(2)
    wrapper.process.send_signal(signal.SIGSTOP)

    async def other_has_it() -> bool:
        other = wrappers("true")
        _, said = await asyncio.to_thread(other.process.communicate)
        return "being run by" not in said

    await eventually(other_has_it, "the end of the lease")
    assert all(state(pid) in "XZ" for pid in pids)  # though the wrapper stands still
    wrapper.process.send_signal(signal.SIGCONT)
    assert await asyncio.to_thread(wrapper.process.wait, 60) == 128 + signal.SIGTERM


async def test_a_command_and_what_it_has_started_do_not_outlive_the_wrapper(store: RealStore, wrappers: Any) -> None:
    wrapper = wrappers("echo $$ >> TRACE; sh -c 'echo $$ >> TRACE; exec sleep 300'; echo done")
    pids = await wrapper.pids(2)
    wrapper.process.kill()
    await eventually(lambda: all(state(pid) in "XZ" for pid in pids), "the end of the command and what it has started")


async def test_a_signal_is_passed_on_to_all_that_the_command_has_started(store: RealStore, wrappers: Any) -> None:
    wrapper = wrappers("echo $$ >> TRACE; sh -c 'echo $$ >> TRACE; exec sleep 300'; exit 7")
    pids = await wrapper.pids(2)
    wrapper.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(wrapper.process.wait, 60) == 128 + signal.SIGTERM
    await eventually(lambda: all(state(pid) in "XZ" for pid in pids), "the end of the command")


async def test_what_a_command_leaves_behind_when_it_ends_is_not_killed_later(store: RealStore, wrappers: Any) -> None:
    # By then the number of its group may be another's.
    wrapper = wrappers("sleep 300 2>/dev/null & echo $! > TRACE", frozen="end")
    await eventually(lambda: state(wrapper.process.pid) == "T", "that it stands still")
    [left_behind] = await wrapper.pids(1)
    children = Path(f"/proc/{wrapper.process.pid}/task/{wrapper.process.pid}/children")
    await eventually(lambda: all(state(int(pid)) in "XZ" for pid in children.read_text().split()), "the guardian's end")
    assert state(left_behind) not in "XZ"
    wrapper.process.send_signal(signal.SIGCONT)
    assert await asyncio.to_thread(wrapper.process.wait, 60) == 0


@pytest.mark.parametrize("without", ["a guardian", "descriptors that select() takes"])
def test_a_command_is_run_also_without(tmp_path: Path, without: str) -> None:
    before = {
        "a guardian": KILLED_GUARDIAN,
        "descriptors that select() takes": "import os; kept = [os.dup(2) for _ in range(1100)]",
    }[without]
    code = f"import sys\n{before}\nfrom fastapi_singleton.cli import main\nsys.exit(main())"
    line = [sys.executable, "-c", code, "run", "nightly", "--", "sh", "-c", "exit 7"]
    environment = {**os.environ, "FASTAPI_SINGLETON_URL": RealSqlite(tmp_path).url}
    if without != "a guardian" and resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200:
        pytest.skip("so many descriptors may not be opened here")
    assert subprocess.run(line, env=environment, timeout=60, check=False).returncode == 7


def test_a_wrapper_ends_also_if_its_guardian_was_stopped(tmp_path: Path) -> None:
    before = KILLED_GUARDIAN.replace("SIGKILL", "SIGSTOP")
    code = f"import sys\n{before}\nfrom fastapi_singleton.cli import main\nsys.exit(main())"
    environment = {**os.environ, "FASTAPI_SINGLETON_URL": RealSqlite(tmp_path).url}
    line = [sys.executable, "-c", code, "run", "nightly", "--", "sh", "-c", "exit 7"]
    assert subprocess.run(line, env=environment, timeout=30, check=False).returncode == 7
