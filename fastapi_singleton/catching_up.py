"""Which ticks have no row, and what is to become of them.

A tick is looked for where nobody can have forgotten it: in the trigger itself, over the time since the fleet first met the
job (or its schedule changed), less what has a row. "Everything after the newest row" would not do: a tick that failed to
be claimed, followed by one that succeeded, would never be looked at again.
"""

import copy
import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

# Ticks of one job that are listed one by one as missed. After days without a leader a job of every second has more.
MOST_MISSED = 1000
INSTANT = timedelta(microseconds=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)  # where an interval starts if all workers are to agree on it


@dataclass
class Plan:
    """What becomes of a job's ticks that have no row."""

    run: list[datetime] = field(default_factory=list)
    coalesced: list[datetime] = field(default_factory=list)
    missed: list[datetime] = field(default_factory=list)
    unlisted_until: datetime | None = None  # missed as well, up to here, but too many to list


def ticks_between(trigger: Any, since: datetime, until: datetime) -> Iterator[datetime]:
    """The trigger's ticks in (since, until], in UTC."""
    ticks = ticks_from(trigger, trigger.get_next_fire_time(None, since + INSTANT), until)
    return (tick for tick in ticks if tick > since)  # a date trigger gives its date, whatever it is asked


def ticks_from(trigger: Any, first: datetime | None, until: datetime) -> Iterator[datetime]:
    """A tick and those that follow it, up to `until`, in UTC: two times of one zone are compared by the wall clock, which
    goes back once a year."""
    fire, previous = first, None
    while fire is not None and (tick := fire.astimezone(UTC)) <= until and (previous is None or tick > previous):
        yield tick
        previous, fire = tick, trigger.get_next_fire_time(fire, until)


def next_tick(trigger: Any, now: datetime) -> datetime | None:
    """The trigger's first tick after `now`."""
    tick: datetime | None = trigger.get_next_fire_time(None, now + INSTANT)
    before = None
    # A calendar interval begins with its very first tick, whatever it is asked.
    while tick is not None and tick <= now and tick != before:
        before, tick = tick, trigger.get_next_fire_time(tick, now + INSTANT)
    return tick if tick is not None and tick > now else None


def plan(
    trigger: Any, since: datetime, now: datetime, known: Collection[datetime], *, latest_start: float, coalesce: bool
) -> Plan:
    """What to do about the ticks in (since, now] that are not known: run, or say why not."""
    result = Plan()
    oldest = now - timedelta(seconds=latest_start)
    if since < oldest:
        missing = (tick for tick in ticks_between(trigger, since, oldest - INSTANT) if tick not in known)
        result.missed = list(islice(missing, MOST_MISSED))
        if next(missing, None) is not None:
            result.unlisted_until = oldest
    result.run = [tick for tick in ticks_between(trigger, max(since, oldest - INSTANT), now) if tick not in known]
    if coalesce:
        result.run, result.coalesced = result.run[-1:], result.run[:-1]
    return result


def is_implicit(moment: Any) -> bool:
    """Whether a time was taken from a clock rather than chosen: then it has a fraction of a second, and differs in
    every worker, unless it was put to where all agree."""
    return isinstance(moment, datetime) and (moment.microsecond != 0 or moment == EPOCH)


def anchor(trigger: Any) -> datetime | None:
    """The phase of an interval that counts from whenever this process happened to start; None for any other trigger."""
    if parts := getattr(trigger, "triggers", None):
        return next(filter(None, map(anchor, parts)), None)
    start: Any = getattr(trigger, "start_date", None)
    if isinstance(getattr(trigger, "interval", None), timedelta) and is_implicit(start):
        return start.astimezone(UTC)  # type: ignore[no-any-return]
    return None


def anchored(trigger: Any, phase: datetime | None) -> Any:
    """The trigger with the fleet's phase in place of its own."""
    if phase is None or anchor(trigger) in (None, phase):
        return trigger
    same = copy.copy(trigger)
    if parts := getattr(trigger, "triggers", None):
        same.triggers = [anchored(part, phase) for part in parts]
    else:
        same.start_date = phase.astimezone(trigger.timezone)
    return same


def has_jitter(trigger: Any) -> bool:
    """Whether its ticks are drawn anew each time it is asked."""
    return bool(getattr(trigger, "jitter", None)) or any(map(has_jitter, getattr(trigger, "triggers", ())))


def fingerprint(trigger: Any) -> str:
    """Two triggers with the same fingerprint have the same schedule, whichever process made them."""
    return hashlib.blake2b(_schedule(trigger).encode("utf-8", "replace"), digest_size=8).hexdigest()


def _schedule(trigger: Any) -> str:
    if parts := getattr(trigger, "triggers", None):
        return f"{type(trigger).__name__} {[_schedule(part) for part in parts]} {trigger.jitter}"
    if is_implicit(getattr(trigger, "run_date", None)):
        return "now"
    start, text = getattr(trigger, "start_date", None), repr(trigger)
    # A calendar interval starts on a mere date, which, if nobody chose it, is the day its process began.
    if is_implicit(start) or (start is not None and not isinstance(start, datetime)):
        text = re.sub(r"start_date='[^']*'", "", text)
    return text
