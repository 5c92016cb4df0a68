"""Several workers do anything in any order against each real store; a few lines of model say what must come of it."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fastapi_singleton.backends import find_store
from fastapi_singleton.errors import StoreError
from fastapi_singleton.records import Ending, Entry, Term, Verdict, Worker
from fastapi_singleton.timing import Timing

from ..conftest import eventually
from ..stores import RealStore

WORKERS = 3
START = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=5)
workers = st.integers(0, WORKERS - 1)
ticks = st.integers(0, 3).map(lambda n: START + timedelta(seconds=n))


class Fleet(RuleBasedStateMachine):
    """The model: who leads, the newest token, and one row per tick and attempt."""

    store: RealStore
    number = 0

    @initialize()
    def begin(self) -> None:
        Fleet.number += 1
        self.name = f"model-{Fleet.number}"
        self.runner = asyncio.Runner()
        self.backends: list[Any] = []
        self.labels: list[str] = []
        for _ in range(WORKERS):
            backend, label = self.start()
            self.backends.append(backend)
            self.labels.append(label)
        self.gone: dict[str, Any] = {}  # the workers that have crashed
        self.terms: dict[int, Term] = {}  # the last term of each worker, whether it still leads or not
        self.leader: int | None = None
        self.newest = 0
        self.given_back = False
        self.rows: dict[tuple[str, datetime, int], tuple[Entry, str]] = {}
        self.claimers: dict[tuple[str, datetime, int], str] = {}
        self.sent: list[tuple[int, Entry]] = []
        self.expired: set[int] = set()  # whose lease has ended, and who may not know

    def start(self) -> tuple[Any, str]:
        worker = Worker.here()
        backend = find_store(self.store.url, None).open(self.name, worker, Timing(60.0))
        self.do(backend.attend)
        return backend, worker.worker

    def do(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return self.runner.run(make())

    @rule(who=workers)
    def acquire(self, who: int) -> None:
        if who == self.leader:
            return  # the elector does not ask while it leads
        if self.leader is not None:
            assert self.do(self.backends[who].acquire) is None
            return
        # A session that was dropped is freed by its server in a moment.
        term: Term = self.do(lambda: eventually(self.backends[who].acquire, "an election"))
        assert term.token > self.newest
        self.terms[who], self.leader, self.newest, self.given_back = term, who, term.token, False
        self.expired.discard(who)

    @rule(who=workers)
    def renew(self, who: int) -> None:
        if who in self.terms:
            kept = self.do(lambda: self.backends[who].renew(self.terms[who]))
            assert kept is (who == self.leader)

    @rule(who=workers)
    def release(self, who: int) -> None:
        if who in self.terms and who not in self.expired:  # whose trust lapses in time says nothing more
            self.do(lambda: self.backends[who].release(self.terms[who]))
            if who == self.leader:
                self.leader, self.given_back = None, True

    @precondition(lambda self: self.leader is not None)
    @rule()
    def lose(self) -> None:
        """Trust has lapsed: the worker lets go without asking anybody."""
        assert self.leader is not None
        leader = self.backends[self.leader]
        self.do(lambda: _forfeit(leader))
        self.leader = None

    @precondition(lambda self: self.leader is not None)
    @rule()
    def expire(self) -> None:
        """The leader is paused for longer than its lease, and goes on as if nothing had been."""
        assert self.leader is not None
        leader = self.backends[self.leader]
        self.do(lambda: self.store.expire(self.name))
        self.do(lambda: _noticed(leader))
        self.expired.add(self.leader)
        self.leader = None

    @rule(who=workers)
    def crash(self, who: int) -> None:
        """Nothing is handed over or written down; another worker is started in its place."""
        self.gone[self.labels[who]] = crashed = self.backends[who]
        self.do(lambda: _forfeit(crashed))
        self.backends[who], self.labels[who] = self.start()
        self.terms.pop(who, None)
        self.expired.discard(who)
        self.sent = [(sender, entry) for sender, entry in self.sent if sender != who]
        if who == self.leader:
            self.leader = None

    @precondition(lambda self: self.leader is not None)
    @rule()
    def sweep(self) -> None:
        for backend in self.backends:
            self.do(backend.attend)
        for label in self.gone:
            self.do(lambda label=label: self.store.unsee(self.name, label))  # type: ignore[misc]
        cut = [
            key for key, (_, outcome) in self.rows.items() if outcome == "running" and self.claimers[key] in self.gone
        ]
        assert self.leader is not None
        leader, term = self.backends[self.leader], self.terms[self.leader]
        assert self.do(lambda: leader.sweep(term)) == len(cut)
        for key in cut:
            self.rows[key] = self.rows[key][0], "abandoned"

    @rule(who=workers, tick=ticks, attempt=st.integers(1, 2))
    def claim(self, who: int, tick: datetime, attempt: int) -> None:
        if who in self.terms:
            self._enter(who, Entry(self.name, "job", tick, attempt, token=self.terms[who].token))

    @rule(who=workers, tick=ticks)
    def claim_without_a_term(self, who: int, tick: datetime) -> None:
        self._enter(who, Entry(self.name, "cron", tick))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def claim_again(self, data: st.DataObject) -> None:
        who, entry = data.draw(st.sampled_from(self.sent))
        self._enter(who, entry)

    def _enter(self, who: int, entry: Entry) -> None:
        [verdict] = self.do(lambda: self.backends[who].enter([entry]))
        own, outcome = self.rows.get(entry.key, (None, ""))
        mine = own is not None and own.nonce == entry.nonce and outcome == "running"
        if mine:
            expected = Verdict.YOURS
        elif entry.token is not None and (entry.token != self.newest or self.given_back):
            expected = Verdict.LOST  # but where nobody has followed a worker that lost its term, its token still counts
        else:
            expected = Verdict.TAKEN if own is not None else Verdict.YOURS
        assert verdict is expected
        if verdict is Verdict.YOURS and not mine:
            assert own is None
            self.rows[entry.key] = entry, "running"
            self.claimers[entry.key] = self.labels[who]
        self.sent.append((who, entry))

    @precondition(lambda self: any(outcome == "running" for _, outcome in self.rows.values()))
    @rule(data=st.data(), who=workers)
    def finish(self, data: st.DataObject, who: int) -> None:
        key = data.draw(st.sampled_from([key for key, (_, outcome) in self.rows.items() if outcome == "running"]))
        entry = self.rows[key][0]
        assert self.do(lambda: self.backends[who].finish([Ending(entry, "succeeded", 0.5)])) == set()
        self.rows[key] = entry, "succeeded"

    @invariant()
    def the_ledger_is_what_the_model_says(self) -> None:
        for job in ("job", "cron"):
            found = self.do(lambda job=job: self.backends[0].runs(job, 100))  # type: ignore[misc]
            assert {(row.job, row.scheduled_for, row.attempt): row.outcome for row in found} == {
                key: outcome for key, (_, outcome) in self.rows.items() if key[0] == job
            }

    def teardown(self) -> None:
        for backend in (*getattr(self, "backends", ()), *getattr(self, "gone", {}).values()):
            self.do(backend.close)
        if hasattr(self, "runner"):
            self.runner.close()


async def _noticed(backend: Any) -> None:
    """Where the lease ends with the session, the worker finds the session cut and opens another."""
    with suppress(StoreError):
        await backend.look()
    await backend.look()


async def _forfeit(backend: Any) -> None:
    backend.forfeit()


@pytest.mark.timeout(300)
def test_any_order_of_events_gives_what_the_model_says(store: RealStore) -> None:
    machine = type("FleetOnThisStore", (Fleet,), {"store": store})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
