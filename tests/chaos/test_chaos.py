"""The short form of the storm, on every store; `make chaos` has the long one."""

import time

import pytest

from .deployments import DEPLOYMENTS
from .storm import Storm

FAULTS = (
    "kill leader", "freeze leader", "kill bystander", "terminate leader", "freeze leader briefly", "freeze bystander",
    "reload", "kill leader", "freeze leader",
)  # fmt: skip


RACE_FAULTS = (
    "kill worker", "freeze worker", "terminate worker", "freeze worker briefly", "reload", "kill all workers but one",
    "freeze worker",
)  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("store", "mode"),
    [
        pytest.param(store, mode, marks=pytest.mark.slow if mode == "race" and store != "postgresql" else ())
        for mode in ("leader", "race")
        for store in DEPLOYMENTS
    ],
)
def test_no_tick_is_doubled_and_none_missed_while_workers_and_store_are_killed_frozen_and_cut_off(
    store: str, mode: str
) -> None:
    with Storm(store, mode) as storm:
        faults = [*(FAULTS if mode == "leader" else RACE_FAULTS), *storm.deployment.faults()]
        storm.random.shuffle(faults)
        for fault in faults:
            storm.strike(fault)
            storm.go_on()
        report = storm.settle()
    assert report.faults.total() == len(faults)
    assert report.clean, report.table()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", DEPLOYMENTS)
def test_a_store_that_is_away_for_twenty_seconds_stops_no_answer_and_costs_no_tick(store: str) -> None:
    with Storm(store) as storm:
        storm.go_on()
        told: set[str] = set()
        with storm.deployment.away():
            until = time.monotonic() + 20
            while time.monotonic() < until:
                status = storm.gunicorn.status()  # raises unless it is answered, with 200
                told |= {*status["problems"]}
                time.sleep(0.1)
        storm.go_on()
        report = storm.settle()
    assert told
    assert report.clean, report.table()
    assert report.ticks >= 2 * 20
