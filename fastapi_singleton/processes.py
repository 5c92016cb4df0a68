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
    if not pid.isdecimal() or not start or boot != _boot() or namespace != _namespace():
        return None
    return _start_time(int(pid)) == start


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """In clock ticks since the boot; empty for a process that is gone, or dead and not yet buried."""
    # The command's name, in parentheses, may hold spaces and parentheses itself.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return "" if len(fields) < 20 or fields[0] in "ZX" else fields[19]


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
