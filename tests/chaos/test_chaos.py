"""The short form of the storm, on every store; `make chaos` has the long one."""

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
