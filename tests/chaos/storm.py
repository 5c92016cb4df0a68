"""Four real gunicorn workers, a tick each second, and one fault after the other; then every tick is asked for.

A tick is *doubled* if one attempt had its effect twice, or an at-most-once job had any twice. It is *missed* if it has no row,
or a row that does not say why its effect is not there. A run that is cut short by a kill between its claim and its
effect is neither: its row says `abandoned`, and an at-least-once job has run again.
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
            f"{len(self.doubled)} doubled, {len(self.missed)} missed, {len(self.mislabelled)} mislabelled",
            "rows: " + ", ".join(f"{n} {outcome}" for outcome, n in self.outcomes.most_common())
            + "; cause: " + ", ".join(f"{n} {cause}" for cause, n in self.causes.most_common()),
        ]  # fmt: skip
        for label in ("doubled", "missed", "mislabelled"):
            lines += [f"{label}: {what}" for what in getattr(self, label)[:10]]
        return "\n".join(lines)

    @property
    def clean(self) -> bool:
        return not (self.doubled or self.missed or self.mislabelled)


class Storm:
    """A deployment under faults. A context manager; `faults` names what it can do to it."""

    def __init__(self, store: str = "postgresql", *, lease: float = 2.0, seed: int = 0) -> None:
        self.lease = lease
        self.deployment = DEPLOYMENTS[store]()
        self.random = random.Random(seed)
        self.report = Report()
        self.effects = Path(tempfile.mkstemp(prefix="fastapi_singleton_effects_")[1])
        self.faults: dict[str, Callable[[], None]] = {
            "kill leader": lambda: self._at_leader("kill leader", self._kill),
            "kill bystander": lambda: self._kill(self._bystander()),
            "freeze leader": lambda: self._at_leader("freeze leader", lambda pid: self._freeze(pid, self.lease * 1.7)),
            "freeze leader briefly": lambda: self._freeze(self._leader()["pid"], self.lease * 0.4),
            "freeze bystander": lambda: self._freeze(self._bystander(), self.lease * 1.7),
            "terminate leader": lambda: self._at_leader("terminate leader", self._terminate),
            "reload": lambda: os.kill(self.gunicorn.pid, signal.SIGHUP),
            **self.deployment.faults(),
        }

    def __enter__(self) -> "Storm":
        self.deployment.start()
        self.gunicorn = Gunicorn(
            self.deployment.url, app="tests.chaos.app:app", lease=self.lease,
            environment={"CHAOS_EFFECTS": str(self.effects)},
        )  # fmt: skip
        self.gunicorn.start()
        self._leader()
        self.began = datetime.now(UTC)
        return self

    def __exit__(self, *_: object) -> None:
        self._thaw()
        self.gunicorn.__exit__(None, None, None)
        self.deployment.close()
        self.effects.unlink(missing_ok=True)

    def strike(self, fault: str) -> None:
        self.report.faults[fault] += 1
        self.faults[fault]()

    def go_on(self) -> None:
        """Wait until a tick has run that was not due before now."""
        now, deadline = datetime.now(UTC), time.monotonic() + 60
        while not any(tick > now for _, tick, _ in self._effects()):
            assert time.monotonic() < deadline, "no tick runs any more"
            time.sleep(0.05)

    def settle(self) -> Report:
        """Let the fleet come to rest, then account for every tick from the beginning until now."""
        self._thaw()
        self._leader()
        ended = datetime.now(UTC).replace(microsecond=0)
        self.report.seconds = (ended - self.began).total_seconds()
        asyncio.run(self._account(ended))
        return self.report

    # -- faults ------------------------------------------------------------------------------------------------------

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
            for job in JOBS:
                page = await backend.runs(job, 500)
                while page:
                    rows += page
                    page = await backend.runs(job, 500, page[-1].scheduled_for)
            return rows

    def _effects(self) -> Counter[tuple[str, datetime, int]]:
        lines = self.effects.read_text().splitlines()
        return Counter(
            (job, datetime.fromisoformat(tick), int(attempt)) for job, tick, attempt, *_ in map(str.split, lines)
        )

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
