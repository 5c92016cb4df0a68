"""What the fleet remembers of its jobs, from one leader to the next."""

import sqlite3
from collections.abc import Collection, Sequence
from datetime import datetime

from ...records import JobChange, JobNote, JobState
from ..views import parse_time
from .database import Transaction
from .schema import stamp

JOB = "SELECT * FROM fastapi_singleton_job WHERE name = :name AND key = :key"

# Makes a job known at its first meeting, or afresh when its schedule has changed.
MEET = """
INSERT INTO fastapi_singleton_job (name, key, fingerprint, since, anchor, paused)
VALUES (:name, :key, :fingerprint, :now, :anchor, :paused)
ON CONFLICT (name, key) DO UPDATE
SET fingerprint = excluded.fingerprint, since = excluded.since, anchor = excluded.anchor, paused = excluded.paused, removed = 0
"""

# A resumed job owes nothing for the time it was paused; `since` only ever grows.
NOTE = """
UPDATE fastapi_singleton_job
SET paused = coalesce(:paused, paused), removed = coalesce(:removed, removed),
    since = max(since, coalesce(:since, ''), CASE WHEN paused AND :paused = 0 THEN :now ELSE '' END)
WHERE name = :name AND key = :key
"""


def meet(transaction: Transaction, name: str, notes: Sequence[JobNote]) -> dict[str, JobState]:
    states = {}
    for note in notes:
        row = transaction.execute(JOB, name=name, key=note.key).fetchone()
        new = row is None
        if row is None or row["fingerprint"] != note.fingerprint:
            transaction.execute(
                MEET, name=name, key=note.key, fingerprint=note.fingerprint, now=stamp(transaction.now),
                anchor=_optional(note.anchor), paused=note.paused,
            )  # fmt: skip
            row = transaction.execute(JOB, name=name, key=note.key).fetchone()
        states[note.key] = _state(row, new)
    return states


def recall(transaction: Transaction, name: str, keys: Collection[str]) -> dict[str, JobState]:
    rows = {key: transaction.execute(JOB, name=name, key=key).fetchone() for key in keys}
    return {key: _state(row, False) for key, row in rows.items() if row is not None}


def _state(row: sqlite3.Row, new: bool) -> JobState:
    anchor = None if row["anchor"] is None else parse_time(row["anchor"])
    return JobState(parse_time(row["since"]), anchor, bool(row["paused"]), bool(row["removed"]), new)


def note(transaction: Transaction, name: str, changes: Sequence[JobChange]) -> None:
    now = stamp(transaction.now)
    for change in changes:
        transaction.execute(
            NOTE, name=name, key=change.key, paused=change.paused, removed=change.removed,
            since=_optional(change.since), now=now,
        )  # fmt: skip


def _optional(time: datetime | None) -> str | None:
    return None if time is None else stamp(time)
