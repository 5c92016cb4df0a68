"""Looks for what would keep a store from serving well; each finding says what to do."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import packages_distributions
from typing import Literal

from .backends import Store
from .errors import EmptyStoreError, StoreError
from .records import Fleet, Worker
from .timing import Timing

_MOST_OFFSET = 1.0  # seconds between this host's clock and the store's


@dataclass(frozen=True)
class Finding:
    level: Literal["ok", "warning", "problem"]
    text: str
    hint: str = ""


async def examine(store: Store, name: str) -> list[Finding]:
    """Everything that can be known of the store from here."""
    findings = list(_installation())
    backend = store.open(name, Worker.here(role="onlooker"), Timing(10.0))
    try:
        await backend.connect()
        await backend.look()
        findings.append(Finding("ok", f"{store.detail} answers and may be led on"))
        findings.append(_clock(backend.now()))
        findings += [Finding(level, text, hint) for level, text, hint in await backend.examine()]
        findings += _fleet(name, backend.fleet)
    except EmptyStoreError as error:
        findings.append(Finding("warning", _without_hint(error), error.hint))
    except StoreError as error:
        findings.append(Finding("problem", _without_hint(error), error.hint))
    finally:
        await backend.close()
        backend.forfeit()
    return findings


def _installation() -> Iterator[Finding]:
    claiming = sorted(set(packages_distributions().get("fastapi_singleton", ())))
    if len(claiming) > 1:
        yield Finding(
            "problem",
            f"{' and '.join(claiming)} both install a package fastapi_singleton",
            "uninstall both, then install fastapi-singleton-scheduler alone.",
        )
    else:
        yield Finding("ok", "one distribution installs fastapi_singleton")


def _clock(store_now: datetime) -> Finding:
    offset = (datetime.now(UTC) - store_now).total_seconds()
    text = f"this host's clock is {abs(offset):.3f} s {'ahead of' if offset > 0 else 'behind'} the store's"
    if abs(offset) <= _MOST_OFFSET:
        return Finding("ok", text)
    return Finding("warning", text, "schedules follow the store's clock; let NTP set both.")


def _fleet(name: str, fleet: Fleet) -> Iterator[Finding]:
    roles = Counter(worker.role for worker in fleet.workers)
    if roles["standby"] and fleet.leader is None:
        text = f"{roles['standby']} worker(s) of {name!r} and no leader"
        yield Finding("warning", text, "look into their logs and status.")
    else:
        led = ", one of them leads" if fleet.leader is not None else ""
        yield Finding("ok", f"{roles.total()} worker(s) of {name!r}{led}")


def _without_hint(error: StoreError) -> str:
    return str(error).removesuffix(f" Hint: {error.hint}")
