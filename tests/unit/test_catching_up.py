"""Which ticks have no row: tables over triggers, time zones and policies, with real APScheduler triggers."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from fastapi_singleton.catching_up import MOST_MISSED, anchor, anchored, fingerprint, next_tick, plan, ticks_between

BERLIN = ZoneInfo("Europe/Berlin")


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def times(ticks: Any) -> list[str]:
    return [f"{tick:%d %H:%M}" for tick in ticks]


START = utc("2026-11-18 10:00")


@pytest.mark.parametrize(
    ("trigger", "since", "until", "expected"),
    [
        (CronTrigger(minute="*/5", timezone="UTC"), "10:00", "10:11", ["18 10:05", "18 10:10"]),
        (CronTrigger(minute="*/5", timezone="UTC"), "10:04", "10:10", ["18 10:05", "18 10:10"]),
        (CronTrigger(hour=15, timezone="UTC"), "10:00", "14:59", []),
        (IntervalTrigger(minutes=4, start_date=START, timezone="UTC"), "10:00", "10:09", ["18 10:04", "18 10:08"]),
        (IntervalTrigger(minutes=4, start_date=START, timezone="UTC"), "09:00", "10:03", ["18 10:00"]),
        (DateTrigger(START, timezone="UTC"), "09:59", "10:05", ["18 10:00"]),
        (DateTrigger(START, timezone="UTC"), "10:00", "10:05", []),
        (DateTrigger(START, timezone="UTC"), "09:50", "09:59", []),
        (
            OrTrigger([CronTrigger(minute=5, timezone="UTC"), CronTrigger(minute=7, timezone="UTC")]),
            "10:00", "10:30", ["18 10:05", "18 10:07"],
        ),
    ],
)  # fmt: skip
def test_the_ticks_of_a_trigger_after_one_time_and_up_to_another(
    trigger: Any, since: str, until: str, expected: list[str]
) -> None:
    found = ticks_between(trigger, utc(f"2026-11-18 {since}"), utc(f"2026-11-18 {until}"))
    assert times(found) == expected


@pytest.mark.parametrize(
    ("trigger", "since", "until", "expected"),
    [
        # Summer time begins on 2026-03-29 at 02:00 and ends on 2026-10-25 at 03:00, local time.
        (CronTrigger(hour=2, minute=30, timezone=BERLIN), "2026-03-27 12:00", "2026-03-31 12:00",
         ["28 01:30", "29 01:30", "30 00:30", "31 00:30"]),
        (CronTrigger(minute=30, timezone=BERLIN), "2026-03-28 23:00", "2026-03-29 03:00",
         ["28 23:30", "29 00:30", "29 01:30", "29 02:30"]),
        (CronTrigger(minute=30, timezone=BERLIN), "2026-10-24 23:00", "2026-10-25 03:00",
         ["24 23:30", "25 00:30", "25 01:30", "25 02:30"]),
        (IntervalTrigger(hours=1, start_date=utc("2026-10-24 22:15"), timezone=BERLIN), "2026-10-24 23:00", "2026-10-25 03:00",
         ["24 23:15", "25 00:15", "25 01:15", "25 02:15"]),
        (DateTrigger("2026-10-25 02:30:00", timezone=BERLIN), "2026-10-24 00:00", "2026-10-26 00:00", ["25 00:30"]),
    ],
)  # fmt: skip
def test_ticks_over_a_change_of_the_clocks(trigger: Any, since: str, until: str, expected: list[str]) -> None:
    found = list(ticks_between(trigger, utc(since), utc(until)))
    assert times(found) == expected
    assert all(earlier < later for earlier, later in pairwise(found))


MINUTELY = CronTrigger(minute="*", timezone="UTC")


@pytest.mark.parametrize(
    ("known", "late", "coalesce", "run", "coalesced", "missed"),
    [
        ([], 600, False, [1, 2, 3, 4, 5], [], []),
        ([], 600, True, [5], [1, 2, 3, 4], []),
        ([1, 2, 3, 4, 5], 600, True, [], [], []),
        ([2, 4], 600, False, [1, 3, 5], [], []),  # not only what follows the newest
        ([5], 600, True, [4], [1, 2, 3], []),
        ([], 120, False, [3, 4, 5], [], [1, 2]),
        ([1], 120, True, [5], [3, 4], [2]),
        ([], 0, False, [5], [], [1, 2, 3, 4]),
    ],
)
def test_what_becomes_of_ticks_without_a_row(
    known: list[int], late: float, coalesce: bool, run: list[int], coalesced: list[int], missed: list[int]
) -> None:
    def ticks(minutes: list[int]) -> list[datetime]:
        return [START + timedelta(minutes=n) for n in minutes]

    now = START + timedelta(minutes=5)
    found = plan(MINUTELY, START, now, set(ticks(known)), latest_start=late, coalesce=coalesce)
    assert found.run == ticks(run)
    assert found.coalesced == ticks(coalesced)
    assert found.missed == ticks(missed)
    assert found.unlisted_until is None


def test_a_year_without_a_leader_is_told_in_a_bounded_number_of_rows() -> None:
    every_second = CronTrigger(second="*", timezone="UTC")
    now = START + timedelta(days=365)
    found = plan(every_second, START, now, set(), latest_start=60, coalesce=True)
    assert len(found.missed) == MOST_MISSED
    assert found.missed[0] == START + timedelta(seconds=1)
    assert found.unlisted_until == now - timedelta(seconds=60)
    assert found.run == [now]
    assert len(found.coalesced) == 60


def test_the_next_tick_is_after_now() -> None:
    assert next_tick(MINUTELY, START) == START + timedelta(minutes=1)
    assert next_tick(DateTrigger(START), START - timedelta(seconds=1)) == START
    assert next_tick(DateTrigger(START), START) is None


def test_an_interval_keeps_the_phase_the_fleet_gave_it() -> None:
    first, second = IntervalTrigger(hours=1, timezone="UTC"), IntervalTrigger(hours=1, timezone="UTC")
    assert anchor(first) != anchor(second)
    phase = START - timedelta(days=2)
    same = [anchored(trigger, phase) for trigger in (first, second)]
    now = START + timedelta(minutes=7)
    assert [next_tick(trigger, now) for trigger in same] == [START + timedelta(hours=1)] * 2
    assert anchor(first) != phase  # the application's own trigger is left as it was


def test_an_interval_inside_another_trigger_takes_up_the_phase_too() -> None:
    own = OrTrigger([CronTrigger(hour=3, timezone="UTC"), IntervalTrigger(hours=1, timezone="UTC")])
    phase = START - timedelta(days=2)
    same = anchored(own, phase)
    assert next_tick(same, START + timedelta(minutes=7)) == START + timedelta(hours=1)
    assert (anchor(same), anchor(own) == phase) == (None, False)


def test_an_interval_with_a_chosen_start_keeps_it() -> None:
    chosen = IntervalTrigger(hours=1, start_date=START, timezone="UTC")
    assert anchor(chosen) is None
    assert anchored(chosen, START + timedelta(minutes=3)) is chosen


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (IntervalTrigger(hours=1), IntervalTrigger(hours=1), True),
        (IntervalTrigger(hours=1), IntervalTrigger(hours=2), False),
        (IntervalTrigger(hours=1, start_date=START), IntervalTrigger(hours=1, start_date=START), True),
        (
            IntervalTrigger(hours=1, start_date=START),
            IntervalTrigger(hours=1, start_date=utc("2026-11-18 10:30")),
            False,
        ),
        (CronTrigger(hour=15), CronTrigger(hour=15), True),
        (CronTrigger(hour=15), CronTrigger(hour=16), False),
        (CronTrigger(hour=15, timezone="UTC"), CronTrigger(hour=15, timezone=BERLIN), False),
        (CronTrigger(hour=15, start_date=datetime.now(UTC)), CronTrigger(hour=16, start_date=datetime.now(UTC)), False),
        (DateTrigger(), DateTrigger(), True),
        (DateTrigger(START), DateTrigger(utc("2026-11-19 10:00")), False),
        (CalendarIntervalTrigger(days=2), CalendarIntervalTrigger(days=2, start_date="2026-01-01"), True),
        (CalendarIntervalTrigger(days=2), CalendarIntervalTrigger(days=3), False),
        (OrTrigger([IntervalTrigger(hours=1)]), OrTrigger([IntervalTrigger(hours=1)]), True),
        (OrTrigger([IntervalTrigger(hours=1)]), OrTrigger([IntervalTrigger(hours=2)]), False),
        (OrTrigger([IntervalTrigger(hours=1)]), AndTrigger([IntervalTrigger(hours=1)]), False),
    ],
)
def test_a_fingerprint_tells_schedules_apart_and_not_processes(one: Any, other: Any, same: bool) -> None:
    assert (fingerprint(one) == fingerprint(other)) is same


def test_ticks_that_nobody_ran_are_told_though_thousands_before_them_were() -> None:
    every_second = CronTrigger(second="*", timezone="UTC")
    since = START - timedelta(seconds=MOST_MISSED * 3)
    known = set(ticks_between(every_second, since, START - timedelta(seconds=100)))
    result = plan(every_second, since, START, known, latest_start=10, coalesce=False)
    assert len(result.missed) == 89
    assert len(result.run) == 11
    assert result.unlisted_until is None


def test_a_calendar_interval_that_began_long_ago_has_a_next_tick() -> None:
    daily = CalendarIntervalTrigger(days=1, hour=3, start_date="2020-01-01", timezone="UTC")
    for trigger in (daily, OrTrigger([daily])):
        assert next_tick(trigger, START) == utc("2026-11-19 03:00")
    assert next_tick(DateTrigger(START), START) is None
