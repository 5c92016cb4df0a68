"""What SQLite complains of, in words an operator can act on."""

import os
import sqlite3

from ...errors import StoreError, UnsafeStoreError
from .address import is_allowed

_PRIMARY = 0xFF  # the low byte of an extended error code is the general one


def gone(path: str) -> StoreError:
    return StoreError(
        f"{path} was deleted or replaced while it was in use.",
        hint="nothing to do now, the file that is there (or a new one) is used from here on; stop all workers before you "
        "move it, because what it knew of past runs is lost to them.",
    )


def no_answer(path: str) -> StoreError:
    return StoreError(
        f"{path} did not answer in time.", hint="look for a slow or full disk, or a process that holds the file locked."
    )


def let_go(path: str) -> StoreError:
    return StoreError(
        f"{path} was let go of after an error.", hint="nothing to do: it is opened again at the next try."
    )


def explain(error: Exception, path: str) -> StoreError:
    """The same failure, with the cause and the cure."""
    if isinstance(error, StoreError):
        return error
    text = f"{type(error).__name__}: {error}"
    match getattr(error, "sqlite_errorcode", None):
        case sqlite3.SQLITE_READONLY_DBMOVED:
            return gone(path)
        case int(code):
            return _by_code(code & _PRIMARY, text, path)
        case _:
            return StoreError(f"{path} cannot be used ({text}).", hint="check the file and this worker's log.")


def _by_code(code: int, text: str, path: str) -> StoreError:
    match code:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreError(
                f"{path} is locked by another process for too long ({text}).",
                hint="look for a backup, a shell or a stopped worker in the middle of a transaction (`fuser -v` names it).",
            )
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            return _not_writable(text, path)
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return UnsafeStoreError(
                f"{path} is damaged or no SQLite database ({text}).",
                hint="stop all workers, then restore it from a backup or move it away: a new one is created.",
            )
        case sqlite3.SQLITE_FULL:
            return StoreError(f"The disk of {path} is full ({text}).", hint="make room; nothing was written.")
        case sqlite3.SQLITE_CANTOPEN if _is_forbidden(path):
            return _not_writable(text, path)
        case sqlite3.SQLITE_CANTOPEN:
            return StoreError(
                f"{path} cannot be opened ({text}).", hint="see that its directory is there and this user may write it."
            )
        case sqlite3.SQLITE_IOERR:
            return StoreError(
                f"{path} cannot be read or written ({text}).", hint="check the disk and the kernel's log."
            )
        case sqlite3.SQLITE_ERROR if "no such table" in text:
            return StoreError(
                f"Tables of fastapi_singleton are gone ({text}).", hint="they are created again at the next try."
            )
        case _:
            return StoreError(f"{path} cannot be used ({text}).", hint="check the file and this worker's log.")


def _not_writable(text: str, path: str) -> StoreError:
    return UnsafeStoreError(
        f"{path} cannot be written ({text}).",
        hint="let every worker's user write the file, its directory and the -wal and -shm files beside it.",
    )


def _is_forbidden(path: str) -> bool:
    """Whether the file or its directory is there and may not be written, so that waiting would not help."""
    directory = os.path.dirname(os.path.realpath(path))
    return any(os.path.exists(each) and not is_allowed(each, os.W_OK) for each in (directory, path))
