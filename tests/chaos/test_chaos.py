"""The short form of the storm; `make chaos` has the long one."""

import pytest

from .storm import Storm

FAULTS = (
    "kill leader", "freeze leader", "cut sessions", "kill bystander", "terminate leader", "freeze leader briefly",
    "restart store", "freeze bystander", "kill leader", "reload", "kill store", "freeze leader",
)  # fmt: skip


@pytest.mark.timeout(300)
def test_no_tick_is_doubled_and_none_missed_while_workers_and_store_are_killed_frozen_and_cut_off() -> None:
    with Storm() as storm:
        for fault in FAULTS:
            storm.strike(fault)
            storm.go_on()
        report = storm.settle()
    assert report.faults.total() == len(FAULTS)
    assert report.clean, report.table()
