"""Which processes are known to live, which to be dead, and which cannot be told from here."""

import os
import signal
import subprocess

import pytest

from fastapi_singleton import processes
from fastapi_singleton.processes import identity, provably_alive, provably_dead


def what_is_known(process: str) -> tuple[bool, bool]:
    return provably_alive(process), provably_dead(process)


def test_a_process_lives_until_it_is_dead_also_if_it_is_frozen_or_not_yet_buried() -> None:
    child = subprocess.Popen(["sleep", "300"])
    process = identity(child.pid)
    assert what_is_known(process) == (True, False)
    child.send_signal(signal.SIGSTOP)
    assert what_is_known(process) == (True, False)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and its parent has not looked
    assert what_is_known(process) == (False, True)
    child.wait()
    assert what_is_known(process) == (False, True)


def test_a_pid_that_belongs_to_another_process_by_now_proves_the_first_one_dead() -> None:
    boot, namespace, pid, start = identity().rsplit("/", 3)
    assert what_is_known(f"{boot}/{namespace}/{pid}/{int(start) - 1}") == (False, True)


@pytest.mark.parametrize("process", ["", "nonsense", "another-boot/pid:[1]/1/1", "/".join(["x"] * 9)])
def test_nothing_is_known_of_what_is_not_of_this_machine(process: str) -> None:
    assert what_is_known(process) == (False, False)


@pytest.mark.parametrize("differs", ["boot", "namespace"])
def test_a_process_of_another_boot_or_namespace_is_not_taken_for_dead_though_all_else_is_the_same(differs: str) -> None:
    """Two containers may show the same boot, and the same pids; two boots may show the same namespace."""
    boot, namespace, pid, start = identity().split("/", 3)
    other = {"boot": boot, "namespace": namespace} | {differs: "another"}
    for when in (start, int(start) - 1):
        assert what_is_known(f"{other['boot']}/{other['namespace']}/{pid}/{when}") == (False, False)


def test_nothing_is_known_of_a_process_that_the_system_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    process, read = identity(), processes._read
    monkeypatch.setattr(processes, "_read", lambda path: "" if path.endswith("/stat") else read(path))
    assert what_is_known(process) == (False, False)


def test_nothing_is_known_where_proc_is_that_of_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    process, pid = identity(), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)  # what /proc/self does not lead to
    assert identity() == ""
    assert what_is_known(process) == (False, False)
