"""Four real gunicorn workers, a tick each second, and one fault after the other; then every tick is asked for.

A tick is *doubled* if one attempt had its effect twice, or an at-most-once job had any twice. It is *missed* if it has no row,
or a row that does not say why its effect is not there. A run that is cut short by a kill between its claim and its
effect is neither: its row says `abandoned`, and an at-least-once job has run again. A *gap* is the time between two effects
while the store was well and one worker at least was: in a race one tick may die with its worker, and no other is held up.
Two runs of a job that must be alone, at the same time, *overlap*.
"""

import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from example_app.server import Gunicorn
from fastapi_singleton.backends import find_store
from fastapi_singleton.ledger import open_ledger
from fastapi_singleton.records import RunView
from fastapi_singleton.timing import Timing

from .deployments import DEPLOYMENTS

JOBS = ("once", "again")


@dataclass
class Report:
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    failovers: dict[str, list[float]] = field(default_factory=dict)
    ticks: int = 0
    doubled: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    mislabelled: list[str] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)
    slow: int = 0
    gap: float = 0.0
    causes: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def table(self) -> str:
        lines = [f"{'fault':<24}{'times':>6}{'fail-over: median':>20}{'max':>10}"]
        for fault, times in sorted(self.faults.items()):
            took = sorted(self.failovers.get(fault, []))
            figures = f"{took[len(took) // 2]:>18.3f} s{took[-1]:>8.3f} s" if took else f"{'–':>20}{'–':>10}"
            lines.append(f"{fault:<24}{times:>6}{figures}")
        lines += [
            "",
            f"{self.ticks} ticks in {self.seconds:.0f} s under {self.faults.total()} faults: "
            f"{len(self.doubled)} doubled, {len(self.missed)} missed, {len(self.mislabelled)} mislabelled, "
            f"{len(self.overlaps)} of {self.slow} runs that must be alone were not; "
            f"longest gap while the store was well: {self.gap:.3f} s",
            "rows: " + ", ".join(f"{n} {outcome}" for outcome, n in self.outcomes.most_common())
            + "; cause: " + ", ".join(f"{n} {cause}" for cause, n in self.causes.most_common()),
        ]  # fmt: skip
        for label in ("doubled", "missed", "mislabelled", "overlaps"):
            lines += [f"{label}: {what}" for what in getattr(self, label)[:10]]
        return "\n".join(lines)

    @property
    def clean(self) -> bool:
        return not (self.doubled or self.missed or self.mislabelled or self.overlaps)


class Storm:
    """A deployment under faults. A context manager; `faults` names what it can do to it."""

    def __init__(self, store: str = "postgresql", mode: str = "leader", *, lease: float = 2.0, seed: int = 0) -> None:
        self.mode = mode
        self.lease = lease
        self.deployment = DEPLOYMENTS[store]()
        self.random = random.Random(seed)
        self.report = Report()
        self.effects = Path(tempfile.mkstemp(prefix="fastapi_singleton_effects_")[1])
        at_workers = self._faults_of_a_race() if mode == "race" else self._faults_of_a_leader()
        self.faults: dict[str, Callable[[], None]] = {
            **at_workers,
            "reload": lambda: os.kill(self.gunicorn.pid, signal.SIGHUP),
            **self.deployment.faults(),
        }
        self._unwell: list[tuple[float, float]] = []  # when the store was, and what follows from it

    def __enter__(self) -> "Storm":
        self.deployment.start()
        self.gunicorn = Gunicorn(
            self.deployment.url, app="tests.chaos.app:app", lease=self.lease,
            environment={"CHAOS_EFFECTS": str(self.effects), "CHAOS_MODE": self.mode},
        )  # fmt: skip
        self.gunicorn.start()
        self._ready()
        self.began = datetime.now(UTC)
        return self

    def __exit__(self, *_: object) -> None:
        self._thaw()
        self.gunicorn.__exit__(None, None, None)
        self.deployment.close()
        for file in self.effects.parent.glob(f"{self.effects.name}*"):
            file.unlink()

    def strike(self, fault: str) -> None:
        self.report.faults[fault] += 1
        began = time.time()
        self.faults[fault]()
        if fault in self.deployment.faults() or fault == "reload":
            self._unwell.append((began - 1, time.time() + 4 * self.lease))

    def go_on(self) -> None:
        """Wait until a tick has run that was not due before now."""
        now, deadline = datetime.now(UTC), time.monotonic() + 60
        while not any(tick > now for _, tick, _ in self._effects()):
            assert time.monotonic() < deadline, "no tick runs any more"
            time.sleep(0.05)

    def settle(self) -> Report:
        """Let the fleet come to rest, then account for every tick from the beginning until now."""
        self._thaw()
        self._ready()
        ended = datetime.now(UTC).replace(microsecond=0)
        self.report.seconds = (ended - self.began).total_seconds()
        asyncio.run(self._account(ended))
        return self.report

    # -- faults ------------------------------------------------------------------------------------------------------

    def _faults_of_a_leader(self) -> dict[str, Callable[[], None]]:
        return {
            "kill leader": lambda: self._at_leader("kill leader", self._kill),
            "kill bystander": lambda: self._kill(self._bystander()),
            "freeze leader": lambda: self._at_leader("freeze leader", lambda pid: self._freeze(pid, self.lease * 1.7)),
            "freeze leader briefly": lambda: self._freeze(self._leader()["pid"], self.lease * 0.4),
            "freeze bystander": lambda: self._freeze(self._bystander(), self.lease * 1.7),
            "terminate leader": lambda: self._at_leader("terminate leader", self._terminate),
        }

    def _faults_of_a_race(self) -> dict[str, Callable[[], None]]:
        def anyone() -> int:
            return self.random.choice(self.gunicorn.children())

        def most(strike: Callable[[int], None]) -> None:
            for pid in self.random.sample(children := self.gunicorn.children(), len(children) - 1):
                strike(pid)

        return {
            "kill worker": lambda: self._kill(anyone()),
            "kill all workers but one": lambda: most(self._kill),
            "freeze worker": lambda: self._freeze(anyone(), self.lease * 1.7),
            "freeze worker briefly": lambda: self._freeze(anyone(), self.lease * 0.4),
            "terminate worker": lambda: self._terminate(anyone()),
        }

    def _ready(self) -> None:
        if self.mode == "race":
            self.gunicorn.wait_for(lambda status: bool(status["workers"]) and status["status"] == "ok", "a worker")
        else:
            self._leader()

    def _leader(self) -> dict[str, Any]:
        return self.gunicorn.leader()

    def _bystander(self) -> int:
        leader = self._leader()["pid"]
        return self.random.choice([pid for pid in self.gunicorn.children() if pid != leader])

    def _at_leader(self, fault: str, strike: Callable[[int], None]) -> None:
        leader = self._leader()
        struck = time.time()
        strike(leader["pid"])
        # By the token, not by the worker: one that froze in the middle of a write to a file may lead again.
        following = self.gunicorn.wait_for(
            lambda status: bool(status["leader"]) and status["leader"]["token"] > leader["token"], "an election"
        )["leader"]
        acquired = datetime.fromisoformat(following["acquired_at"]).timestamp()
        self.report.failovers.setdefault(fault, []).append(acquired - struck)

    @staticmethod
    def _kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _terminate(pid: int) -> None:
        os.kill(pid, signal.SIGTERM)

    def _freeze(self, pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _thaw(self) -> None:
        for pid in self.gunicorn.children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # -- accounting --------------------------------------------------------------------------------------------------

    async def _rows(self) -> list[RunView]:
        """Every row of the ledger, as anybody may read it."""
        async with open_ledger(find_store(self.deployment.url, None), "chaos", Timing(10.0)) as (backend, _):
            rows: list[RunView] = []
            for job in (*JOBS, "slow"):
                page = await backend.runs(job, 500)
                while page:
                    rows += page
                    page = await backend.runs(job, 500, page[-1].scheduled_for)
            self.report.slow = sum(row.job == "slow" and row.started_at is not None for row in rows)
            return [row for row in rows if row.job in JOBS]

    def _effects(self) -> Counter[tuple[str, datetime, int]]:
        lines = self.effects.read_text().splitlines()
        return Counter(
            (job, datetime.fromisoformat(tick), int(attempt)) for job, tick, attempt, *_ in map(str.split, lines)
        )

    def _gap(self) -> float:
        """The longest time without an effect, but for when the store was unwell."""
        times = sorted(float(line.split()[-1]) for line in self.effects.read_text().splitlines())
        return max(
            (after - before for before, after in pairwise(times)
             if not any(before < until and since < after for since, until in self._unwell)),
            default=0.0,
        )  # fmt: skip

    async def _account(self, ended: datetime) -> None:
        due = [self.began.replace(microsecond=0) + timedelta(seconds=n + 1) for n in range(int(self.report.seconds))]
        deadline = time.monotonic() + 60
        while True:
            rows = await self._rows()
            ledger = {(row.job, row.scheduled_for, row.attempt): row for row in rows}
            effects = self._effects()
            pending = [
                key for key in ((job, tick, 1) for job in JOBS for tick in due)
                if key not in ledger or ledger[key].outcome == "running"
            ]  # fmt: skip
            if not pending or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.2)
        report = self.report
        report.ticks = len(due) * len(JOBS)
        report.gap = self._gap()
        overlaps = Path(f"{self.effects}.overlaps")
        report.overlaps += overlaps.read_text().splitlines() if overlaps.exists() else []
        report.outcomes.update(row.outcome for row in rows)
        report.causes.update(row.cause for row in rows)
        report.doubled += [
            f"{job} {tick} attempt {attempt}: {n} times" for (job, tick, attempt), n in effects.items() if n > 1
        ]
        for job in JOBS:
            for tick in due:
                had = sum(n for (j, t, _), n in effects.items() if (j, t) == (job, tick))
                row = ledger.get((job, tick, 1))
                cut = row is not None and row.outcome == "abandoned"
                if job == "once" and had > 1:
                    report.doubled.append(f"{job} {tick}: {had} effects")
                if not had and not (job == "once" and cut):
                    report.missed.append(f"{job} {tick}: {row.outcome + ', ' + str(row.error) if row else 'no row'}")
        # Whoever leads since after a tick can only have found it missing.
        report.mislabelled += [
            f"{row.job} {row.scheduled_for} says {row.cause}" for row in rows
            if row.cause == "schedule" and row.scheduled_for.timestamp() < (row.token or 0) / 1000 - 1
        ]  # fmt: skip
