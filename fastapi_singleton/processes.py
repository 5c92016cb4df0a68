"""Which process a worker is, beyond doubt, and whether it lives.

A hostname and a pid prove nothing: two containers can show the same hostname, boot id and pid. Only where the boot, the
process namespace, the pid and its start time are all known can one process say of another that it is gone.
"""

import os
from pathlib import Path


def identity(pid: int | None = None) -> str:
    """A text that names one process of one boot in one namespace; empty where the system does not tell."""
    pid = os.getpid() if pid is None else pid
    boot, namespace, start = _boot(), _namespace(), _start_time(pid)
    return f"{boot}/{namespace}/{pid}/{start}" if boot and namespace and start else ""


def provably_dead(process: str) -> bool:
    """Whether the process so named is gone. False where it lives, or where that cannot be known from here."""
    return _lives(process) is False


def provably_alive(process: str) -> bool:
    """Whether the process so named is there, be it frozen. False where it is gone, or where that cannot be known from here."""
    return _lives(process) is True


def _lives(process: str) -> bool | None:
    boot, _, rest = process.partition("/")
    namespace, _, rest = rest.partition("/")
    pid, _, start = rest.partition("/")
    if not pid.isdecimal() or not start or not boot or boot != _boot() or not namespace or namespace != _namespace():
        return None
    found = _start_time(int(pid))
    # What cannot be read may be another user's process in a system that hides those.
    return found == start if found is not None else (False if _is_gone(int(pid)) else None)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _namespace() -> str:
    """Empty also where /proc is that of another namespace: what it tells of a pid is of some other process."""
    try:
        return os.readlink("/proc/self/ns/pid") if os.readlink("/proc/self") == str(os.getpid()) else ""
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """In clock ticks since the boot; empty for a process that is dead and not yet buried, None where nothing can be read."""
    # The command's name, in parentheses, may hold spaces and parentheses itself.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
