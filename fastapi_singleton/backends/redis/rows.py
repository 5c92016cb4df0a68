"""How ticks are keyed in Redis, and how rows are written and read. The scripts count on both."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from ...records import Alive, Crowd, Ending, Entry, JobChange, JobNote, RunView, Verdict
from ..views import clean, run_view

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# From the first year that a datetime knows to 1970: with it, no tick is negative and all have the same width.
_BEFORE_1970 = (_EPOCH - datetime(1, 1, 1, tzinfo=UTC)) // _MICROSECOND


def prefix(name: str) -> str:
    """What all keys of a name begin with. A brace of the name's own would end the hash tag too early."""
    safe = name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return f"fastapi_singleton:{{{safe}}}:"


def label(name: str, hostname: str, pid: int) -> str:
    """What CLIENT LIST shows of a connection: no spaces allowed there, nor anything but ASCII."""
    return quote(f"fastapi_singleton:{pid}:{name}@{hostname}", safe=":@")


def digits(moment: datetime | None) -> str:
    """Microseconds since 1970; nothing for None."""
    return "" if moment is None else str((moment - _EPOCH) // _MICROSECOND)


def microseconds(seconds: float) -> str:
    return str(round(seconds * 1_000_000))


def moment(digits: str) -> datetime:
    return _EPOCH + int(digits) * _MICROSECOND


def word(flag: bool | None) -> str:
    return "" if flag is None else str(int(flag))


def job_key(job: str) -> str:
    """A job's key as Redis takes it: the NUL is ours."""
    return clean(job) or ""


def first_field(job: str) -> str:
    """Before all fields of the job."""
    return f"{job_key(job)}\0"


def last_field(job: str) -> str:
    """After all fields of the job."""
    return f"{job_key(job)}\1"


def tick_field(job: str, tick: datetime) -> str:
    """Before all fields of the tick, and after those of earlier ones."""
    return f"{job_key(job)}\0{(tick - _EPOCH) // _MICROSECOND + _BEFORE_1970:018d}"


def field(entry: Entry) -> str:
    return f"{tick_field(entry.job, entry.tick)}\0{entry.attempt:06d}"


def after_tick(job: str, tick: datetime) -> str:
    """After all fields of the tick."""
    return f"{tick_field(job, tick)}\1"


def tick_of(field: str) -> datetime:
    _, tick, _ = field.rsplit("\0", 2)
    return _EPOCH + (int(tick) - _BEFORE_1970) * _MICROSECOND


def entry_arguments(entries: Sequence[Entry], beside: Collection[str]) -> Iterator[str]:
    yield str(len(beside))
    yield from beside
    for entry in entries:
        yield field(entry)
        yield job_key(entry.job)
        yield digits(entry.tick)
        yield str(entry.attempt)
        yield entry.id
        yield entry.nonce
        yield entry.cause
        yield "" if entry.token is None else str(entry.token)
        yield entry.outcome
        yield digits(entry.latest)
        yield clean(entry.error) or ""
        yield "" if entry.limit is None else str(entry.limit)


def answer(said: Any) -> Verdict | Crowd:
    """What a script has said to an entry: a word, or the runs that are alive."""
    if isinstance(said, str):
        return Verdict(said)
    return Crowd(tuple(Alive(worker, process, bool(seen)) for worker, process, seen in said))


def ending_arguments(endings: Sequence[Ending]) -> Iterator[str]:
    for ending in endings:
        yield field(ending.entry)
        yield ending.entry.nonce
        yield ending.outcome
        yield microseconds(ending.seconds)
        yield clean(ending.error) or ""


def note_arguments(notes: Sequence[JobNote]) -> Iterator[str]:
    for note in notes:
        yield from (job_key(note.key), note.fingerprint, digits(note.anchor), word(note.paused))


def change_arguments(changes: Sequence[JobChange]) -> Iterator[str]:
    for change in changes:
        yield from (job_key(change.key), word(change.paused), word(change.removed), digits(change.since))


def views(documents: Iterable[str]) -> list[RunView]:
    return [_view(json.loads(document)) for document in documents]


def _view(row: dict[str, Any]) -> RunView:
    return run_view(
        {
            "id": row["id"],
            "job": row["job"],
            "scheduled_for": _iso(row["tick"]),
            "started_at": _iso(row.get("started_at")),
            "finished_at": _iso(row.get("finished_at")),
            "outcome": row["outcome"],
            "error": row["error"] or None,
            "attempt": int(row["attempt"]),
            "token": int(row["token"]) if row["token"] else None,
            "worker": row["worker"],
            "cause": row["cause"],
        }
    )


def _iso(digits: str | None) -> str | None:
    return moment(digits).isoformat() if digits else None
