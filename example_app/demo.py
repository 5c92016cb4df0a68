"""`make demo`: the example on four gunicorn workers and a real PostgreSQL, with its log told as a story.

`--once` needs nobody to watch: it kills the leader, measures the fail-over, and fails if any tick ran twice.
"""

import argparse
import os
import re
import signal
import sys
import time
import warnings
from collections import Counter
from contextlib import ExitStack
from datetime import datetime
from types import FrameType

with warnings.catch_warnings():
    # A dependency of the embedded server remarks on XDG_RUNTIME_DIR, which nothing here uses.
    warnings.filterwarnings("ignore", message=".*XDG_RUNTIME_DIR")
    from .embedded import EmbeddedPostgres
    from .server import Gunicorn

WORKERS = 4
STRETCH = 6.0  # seconds before and after the kill: longer than the five between two reports
EVENT = re.compile(
    r"(?P<at>\d\d:\d\d:\d\d) \[(?P<pid>\d+)\] "
    r"(?:Elected: this worker leads with token (?P<token>\d+)|ran (?P<job>\w+) in worker \d+, due at (?P<tick>\S+))"
)


class Interruption:
    """Remembers that someone asked to stop.

    An exception out of the handler could strike between the birth of a process and its registration for clean-up, and
    the servers live in sessions of their own: no signal from the terminal would ever reach the orphan.
    """

    requested = False

    def __init__(self) -> None:
        for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(kind, self._remember)

    def _remember(self, kind: int, frame: FrameType | None) -> None:
        self.requested = True


class Story:
    """Follows the server's log, prints who leads and what runs, and counts the runs of each tick: one that is late may
    run in the same second as the next."""

    def __init__(self, gunicorn: Gunicorn, interruption: Interruption) -> None:
        self.ticks: Counter[tuple[str, str]] = Counter()
        self._log = gunicorn.log.open(encoding="utf-8", errors="replace")
        self._partial = ""
        self._interruption = interruption

    def follow(self, seconds: float = float("inf")) -> None:
        """Returns early when interrupted."""
        deadline = time.monotonic() + seconds
        while not self._interruption.requested and time.monotonic() < deadline:
            self.catch_up()
            time.sleep(0.05)
        self.catch_up()

    def catch_up(self) -> None:
        # The end of the file may be the middle of a line: what follows the last newline waits for its rest.
        *lines, self._partial = (self._partial + self._log.read()).split("\n")
        for line in lines:
            if event := EVENT.fullmatch(line):
                self._tell(event)

    def close(self) -> None:
        self._log.close()

    def _tell(self, event: re.Match[str]) -> None:
        at, pid, token, job, tick = event.group("at", "pid", "token", "job", "tick")
        if token:
            print(f"{at}  ★ worker {pid} leads (token {token})", flush=True)
        else:
            self.ticks[job, tick] += 1
            print(f"{at}    worker {pid} ran {job}, due at {tick}", flush=True)


def kill_the_leader(gunicorn: Gunicorn) -> float:
    """The seconds from the kill to the successor's election: both read the clock of this machine."""
    old = gunicorn.leader()
    print(f"          ✗ SIGKILL to the leader, worker {old['pid']}", flush=True)
    killed_at = time.time()
    os.kill(old["pid"], signal.SIGKILL)
    new = gunicorn.leader(other_than=old["worker"], patience=10.0)
    return datetime.fromisoformat(new["acquired_at"]).timestamp() - killed_at


def once(gunicorn: Gunicorn, story: Story, interruption: Interruption) -> int:
    # Just after a whole second, so that the successor arrives at a tick that has already run: the worst moment.
    story.follow(STRETCH + 1.1 - time.time() % 1)
    if interruption.requested:
        return 1
    failover = kill_the_leader(gunicorn)
    story.follow(STRETCH)
    if interruption.requested:
        return 1
    runs: Counter[str] = Counter()
    duplicates: Counter[str] = Counter()
    for (job, _), count in story.ticks.items():
        runs[job] += count
        duplicates[job] += count - 1
    print()
    for job in ("pulse", "report"):
        print(f"{job + ':':<10}{runs[job]:>4} runs, {duplicates[job]} duplicates")
    print(f"fail-over:{failover * 1000:>5.0f} ms")
    return 0 if runs["pulse"] and runs["report"] and not duplicates.total() else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m example_app.demo", description=__doc__)
    parser.add_argument("--once", action="store_true", help="kill the leader once, judge, and end by itself")
    arguments = parser.parse_args()
    interruption = Interruption()
    try:
        with ExitStack() as stack:
            # Registered before the start, so that a start that fails half-way is cleaned up as well.
            postgres = stack.push(EmbeddedPostgres())
            postgres.start()
            gunicorn = stack.push(Gunicorn(postgres.url, workers=WORKERS))
            gunicorn.start()
            story = Story(gunicorn, interruption)
            stack.callback(story.close)
            gunicorn.wait_for(
                lambda status: interruption.requested or (status["leader"] and len(status["workers"]) == WORKERS),
                f"a leader among {WORKERS} workers",
                patience=15.0,
            )
            print(f"Status: {gunicorn.address}/scheduler/status", flush=True)
            if arguments.once:
                return once(gunicorn, story, interruption)
            print("Ctrl-C ends it. To see a fail-over, kill -9 the leader from another terminal.\n", flush=True)
            story.follow()
            print("\nStopping …", flush=True)
    except (AssertionError, RuntimeError) as failure:
        # Ctrl-C reaches the helpers of a start-up too; that they fail is then no news.
        if not interruption.requested:
            print(failure, file=sys.stderr)
        return 1 if arguments.once or not interruption.requested else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
