"""Which file, and every reason to refuse it that can be known without opening it."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from ...errors import ConfigurationError
from ...records import Run, Worker
from ...timing import Timing

if TYPE_CHECKING:
    from .backend import SqliteBackend

# Several hosts can reach a file there, each with a boot clock and, for SQLite's shared memory, a cache of its own.
_NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
        "nfs4", "ocfs2", "orangefs", "prl_fs", "pvfs2", "s3fs", "smb3", "smbfs", "sshfs", "vboxsf", "virtiofs",
        "ceph-fuse", "curlftpfs", "gcsfuse", "goofys", "grpcfuse", "juicefs", "mfs", "mount.s3", "mountpoint-s3", "rclone",
        "seaweedfs", "vmhgfs-fuse",
    }
)  # fmt: skip
# What SQLAlchemy hands to the driver: it says how *its* connections are made, ours are our own.
_DRIVERS_OWN = frozenset(
    {"cached_statements", "charset", "check_same_thread", "detect_types", "isolation_level", "timeout"}
)
_FORM = "its form is sqlite:///relative.sqlite3 or sqlite:////absolute/path.sqlite3."


@dataclass(frozen=True)
class SqliteStore:
    """A file that may be used, as far as can be told without touching it. Its path does not follow a later chdir()."""

    path: str
    kind: str = "sqlite"

    @property
    def detail(self) -> str:
        return self.path

    @classmethod
    def parse(cls, url: str) -> "SqliteStore":
        path = os.path.abspath(_named_path(url))
        _check_file(path)
        _check_directory(os.path.dirname(os.path.realpath(path)))
        kind = filesystem(os.path.realpath(path))
        if kind is not None and kind.removeprefix("fuse.") in _NETWORK:
            raise ConfigurationError(
                f"{path} lies on a network file system ({kind}), where SQLite cannot keep workers apart.",
                hint="use a local disk; workers on several hosts need PostgreSQL or Redis.",
            )
        return cls(path)

    def open(self, name: str, worker: Worker, timing: Timing) -> "SqliteBackend":
        from .backend import SqliteBackend

        return SqliteBackend(self.path, name, worker, timing)

    async def fence(self, connection: Any, name: str, run: Run) -> None:
        raise ConfigurationError(
            "fence() needs PostgreSQL: only there the ledger and your transaction can be in one database.",
            hint="make the job's effect idempotent with current_run().id, or use a postgresql:// URL.",
        )


def _named_path(url: str) -> str:
    """The path as it stands in the URL; like SQLAlchemy, without decoding anything in it."""
    # The scheme has been looked at already; urlsplit would take a # in the path for the beginning of something else.
    location, _, query = url.partition(":")[2].partition("?")
    if not location.startswith("///") and location not in ("", "//"):
        raise ConfigurationError("The SQLite URL cannot be read.", hint=_FORM)
    path = location[3:]
    if not path or path == ":memory:" or path.startswith("file:") or "\0" in path:
        raise ConfigurationError(
            "The SQLite URL names no file that workers could share.",
            hint=f"a database in memory belongs to one process alone; {_FORM}",
        )
    unknown = sorted({key for key, _ in parse_qsl(query, keep_blank_values=True)} - _DRIVERS_OWN)
    if unknown:
        raise ConfigurationError(
            f"The SQLite URL has options that are not supported: {', '.join(unknown)}.", hint=f"leave them out; {_FORM}"
        )
    return path


def _check_file(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # not there yet, or out of reach: then its directory tells why
    if not stat.S_ISREG(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise ConfigurationError(f"{path} is {what}.", hint="name the file itself; it is created if it is not there.")
    if not is_allowed(path, os.R_OK | os.W_OK):
        raise ConfigurationError(
            f"{path} cannot be read and written by this user.", hint="change its owner or mode, or name another file."
        )


def _check_directory(directory: str) -> None:
    if not os.path.isdir(directory):
        raise ConfigurationError(f"The directory {directory} does not exist.", hint="create it, or correct the URL.")
    # SQLite keeps its log beside the file, so that a writable file alone is not enough.
    if not is_allowed(directory, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"The directory {directory} is not writable.", hint="change its owner or mode, or name a file elsewhere."
        )


def is_allowed(path: str, what: int) -> bool:
    """Whether this user may do that with the file or directory, also as far as its file system is concerned."""
    return os.access(path, what, effective_ids=os.access in os.supports_effective_ids)


def filesystem(path: str, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The type of the file system that a path without symbolic links lies on; None where the system does not tell."""
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    longest, found = -1, None
    for mounted_on, kind in _mounts(lines):
        inside = path == mounted_on or path.startswith(mounted_on.rstrip("/") + "/")
        if inside and len(mounted_on) >= longest:  # of two on the same place the later one hides the other
            longest, found = len(mounted_on), kind
    return found


def _mounts(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        place, _, source = line.partition(" - ")
        fields, kind = place.split(), source.split()[:1]
        if len(fields) > 4 and kind:
            mounted_on = fields[4]
            for escape, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
                mounted_on = mounted_on.replace(escape, character)
            yield mounted_on, kind[0]
