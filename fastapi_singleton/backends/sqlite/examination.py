"""What an operator should know of the file and of where it lies."""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from typing import Literal

from ...records import Worker
from .address import filesystem

Finding = tuple[Literal["ok", "warning", "problem"], str, str]

_LEAST_FREE = 100 * 2**20
_LONGEST_LOG = 64 * 2**20


def examine(path: str, me: Worker) -> list[Finding]:
    """Looks at the file's surroundings; never opens it."""
    return [*_kind(path), *_room(path), *_log(path), *_deaths(me)]


def _kind(path: str) -> Iterator[Finding]:
    kind = filesystem(os.path.realpath(path)) or "a file system that the host does not name"
    yield "ok", f"SQLite {sqlite3.sqlite_version}, write-ahead log, synchronous=FULL, on {kind}", ""


def _room(path: str) -> Iterator[Finding]:
    free = shutil.disk_usage(os.path.dirname(os.path.realpath(path))).free
    text = f"{free // 2**20} MiB are free on its disk"
    yield ("ok", text, "") if free > _LEAST_FREE else ("warning", text, "make room: on a full disk nobody can lead.")


def _log(path: str) -> Iterator[Finding]:
    try:
        size = os.stat(os.path.realpath(path) + "-wal").st_size
    except OSError:
        return
    if size > _LONGEST_LOG:
        text = f"its write-ahead log has grown to {size // 2**20} MiB"
        yield "warning", text, "look for a process that keeps a transaction open on the file (`fuser -v` names it)."


def _deaths(me: Worker) -> Iterator[Finding]:
    if me.process:
        yield "ok", "a leader's death is seen at once by workers of the same process namespace", ""
    else:
        yield "warning", "this system does not tell when a process has died", "nothing to do: the lease is waited for."
