"""The example under real gunicorn workers, as the demo, the tests and the benchmarks run it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from .ports import free_port

PROJECT = Path(__file__).resolve().parent.parent


class Gunicorn:
    """`gunicorn -c gunicorn.conf.py`: a context manager that ends all its processes. Output goes to `log`."""

    def __init__(
        self, url: str, *, app: str = "example_app.main:app", workers: int = 4, lease: float = 10.0,
        host: str = "127.0.0.1", environment: Mapping[str, str] | None = None, prefix: tuple[str, ...] = (),
        directory: Path = PROJECT,
    ) -> None:  # fmt: skip
        self.host, self.port = host, free_port()
        self.workers = workers
        self.log = Path(tempfile.mkstemp(prefix="fastapi_singleton_", suffix=".log")[1])
        self._prefix = prefix
        self._app = app
        self._directory = directory
        self._environment = {
            **os.environ,
            "FASTAPI_SINGLETON_URL": url,
            "EXAMPLE_LEASE": str(lease),
            "WEB_CONCURRENCY": str(workers),
            "BIND": f"{host}:{self.port}",
            "PYTHONPATH": str(PROJECT),
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "gunicorn", "-c", str(PROJECT / "gunicorn.conf.py"), self._app],
                env=self._environment, stdout=log, stderr=log, cwd=self._directory, start_new_session=True,
            )  # fmt: skip

    def stop(self, how: signal.Signals = signal.SIGTERM, patience: float = 60.0) -> None:
        """End the server as its operator would, and whatever is left of its group after that."""
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def __enter__(self) -> "Gunicorn":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # What a test has frozen must wake up to be stopped.
        for pid in self.children():
            _send(pid, signal.SIGCONT)
        self.stop(patience=20.0 if kind is None else 2.0)
        self.log.unlink(missing_ok=True)

    def children(self) -> list[int]:
        """The workers' process ids."""
        if self._process is None:
            return []
        try:
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        except OSError:
            return []

    def get(self, path: str, timeout: float = 5.0) -> Any:
        with urllib.request.urlopen(self.address + path, timeout=timeout) as response:
            return json.load(response)

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = self.get("/scheduler/status")
        return document

    def wait_for(
        self, condition: Callable[[dict[str, Any]], bool], what: str, patience: float = 60.0
    ) -> dict[str, Any]:
        """The first status that satisfies the condition; several workers answer, so that any may be the first."""
        deadline, last = time.monotonic() + patience, "no answer"
        while time.monotonic() < deadline:
            try:
                status = self.status()
            except (urllib.error.URLError, OSError) as error:
                last = repr(error)
            else:
                if condition(status):
                    return status
                last = json.dumps(status)
            time.sleep(0.02)
        raise AssertionError(f"{what} did not happen within {patience} s; last: {last}\n{self.log.read_text()[-4000:]}")

    def leader(self, *, other_than: str | None = None, patience: float = 60.0) -> dict[str, Any]:
        """Wait until a worker leads (another than the one named), and return it as the status shows it."""
        status = self.wait_for(
            lambda s: s["leader"] is not None and s["leader"]["worker"] != other_than, "an election", patience
        )
        leader: dict[str, Any] = status["leader"]
        return leader


def _send(pid: int, how: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, how)
