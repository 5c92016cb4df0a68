"""The one seam a new store has to fill, and the door through which a URL becomes a backend.

Rules of the seam:

- `None` or `False` is a normal loss. An exception (`StoreError`) means the store could not answer; whatever was asked may
  or may not have happened, and the backend has already let go of everything it held, so that nothing is half-owned.
- Every call is bounded in time, and none is made before the lifespan.
- What a store needs is made by the first who comes, but not by an onlooker: that one hears `EmptyStoreError`.
- `fleet` and `now` are refreshed by `acquire`, `renew`, `attend` and `look` alone; reading them asks nobody.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from ..errors import ConfigurationError
from ..records import (
    Crowd,
    Cut,
    Ending,
    Entry,
    Fleet,
    JobChange,
    JobNote,
    JobState,
    JobView,
    Run,
    RunView,
    Term,
    Verdict,
    Worker,
)
from ..timing import Timing

POSTGRESQL = ("postgresql", "postgres", "postgresql+asyncpg")
REDIS = ("redis", "rediss")
SQLITE = ("sqlite", "sqlite+aiosqlite", "sqlite+pysqlite")
DEFAULT_URL = "sqlite:///fastapi_singleton.sqlite3"


class Backend(Protocol):
    """One worker's access to the store: leadership, ledger, and what the fleet remembers of its jobs."""

    @property
    def fleet(self) -> Fleet:
        """What the store said when it was last asked."""

    def now(self) -> datetime:
        """The store's clock as it was last heard, carried on by a local one that no one sets; asks nobody."""

    async def connect(self) -> None:
        """Be ready to ask: what takes long before the first question is done here, and does not eat into its term."""

    async def look(self) -> None:
        """Refresh `fleet` for somebody who is not of it: takes nothing, leaves no trace."""

    async def attend(self, jobs: Sequence[JobView] | None = None) -> None:
        """Show that this worker is alive, without trying to lead: its runs are not given up. Publish its jobs if given."""

    async def acquire(self) -> Term | None:
        """Show that this worker is alive and try to lead: a new term, or None while somebody else leads."""

    async def renew(self, term: Term, jobs: Sequence[JobView] | None = None) -> bool:
        """Keep the term, and publish the leader's jobs if given. False: it is over; never renew it again."""

    async def release(self, term: Term) -> None:
        """End the term and wake the standbys. The token stays known: release expires, it never deletes."""

    def forfeit(self) -> None:
        """Let go of the term without asking anybody: trust has lapsed, so it must never be renewed again."""

    async def vacancy(self, timeout: float) -> None:
        """Wait that long, or less when there is reason to ask the store again (leader gone, own session cut)."""

    async def examine(self) -> list[tuple[Literal["ok", "warning", "problem"], str, str]]:
        """What an operator should know of the store beyond that it answers: level, finding, what to do."""

    async def close(self) -> None:
        """Leave the fleet and let go of the connection. Bounded, and never raises because the store is away."""

    async def enter(self, entries: Sequence[Entry], beside: Collection[str] = ()) -> list[Verdict | Crowd]:
        """Write ticks into the ledger, all in one round trip; one verdict for each, in their order. An entry without a
        token is judged by its row alone. Sending the same entries again, on whatever session, is how a lost reply is
        resolved. No two may have the same key. Where a claim has a limit, it is counted and entered in one step; runs of
        the workers `beside` do not count."""

    async def finish(self, endings: Sequence[Ending]) -> set[str]:
        """Write down how runs ended. Returns the nonces of those whose row somebody holds just now: try them again."""

    async def ticks(self, term: Term, since: Mapping[str, datetime]) -> dict[str, set[datetime]]:
        """For each of these jobs, the ticks after that time that have a row."""

    async def runs(self, job: str, limit: int, before: datetime | None = None) -> list[RunView]:
        """A job's runs, the newest first, from before that tick on."""

    async def meet(self, term: Term, notes: Sequence[JobNote]) -> dict[str, JobState]:
        """Make jobs known to the fleet at their first meeting; what it remembers of each."""

    async def recall(self, term: Term, keys: Collection[str]) -> dict[str, JobState]:
        """What the fleet remembers of those of these jobs that it knows; changes nothing."""

    async def note(self, term: Term, changes: Sequence[JobChange]) -> None:
        """Change what the fleet remembers of jobs."""

    async def unseen(self, term: Term) -> dict[str, str]:
        """Workers that have not been seen for a whole lease, with runs that count as alive; which process each is."""

    async def sweep(self, term: Term, silent: Collection[str] = ()) -> int:
        """Give up the unfinished runs of workers that have not been seen for a whole lease; how many. Those of the `silent`
        ones still count as alive, those of the others no longer."""

    async def cut(self, term: Term, jobs: Sequence[str], attempts: int, within: float) -> list[Cut]:
        """The given jobs' runs that were given up within the last so many seconds, of fewer attempts, not yet repeated."""

    async def prune(self, term: Term, keep: float) -> int:
        """Delete some rows older than that, and see that their ticks can never be claimed again; how many."""


class Store(Protocol):
    """Where the store is, checked and without a connection: what can be known at construction."""

    @property
    def kind(self) -> str:
        """The word for this sort of store in the status."""

    @property
    def detail(self) -> str:
        """Where it is, without a secret."""

    def open(self, name: str, worker: Worker, timing: Timing) -> Backend:
        """A backend for one worker; it connects when it is first asked something."""

    async def fence(self, connection: Any, name: str, run: Run) -> None:
        """Raise unless the run may still write in the transaction this connection is in."""


def find_store(url: str | None, connect: Callable[[], Awaitable[Any]] | None) -> Store:
    """The store a URL (or a function that makes PostgreSQL connections) names; no secret gets into its errors."""
    if url is not None and not isinstance(url, str):
        raise ConfigurationError(
            f"The store's URL must be a string, not {type(url).__name__}.",
            hint="with SQLAlchemy pass engine.url.render_as_string(hide_password=False).",
        )
    if url is None:
        url = "postgresql:" if connect is not None else DEFAULT_URL
    try:
        scheme = urlsplit(url).scheme
    except ValueError:  # brackets that do not match, say; the backend of the scheme says what is wrong
        scheme = url.partition(":")[0]
    if connect is not None and scheme not in POSTGRESQL:
        raise ConfigurationError(
            "connect= makes connections to PostgreSQL only.",
            hint="leave it out, or leave out the URL of another store.",
        )
    # Imported here so that a driver is loaded only by those who use it.
    if scheme in POSTGRESQL:
        from .postgres import PostgresStore

        return PostgresStore.parse(None if url == "postgresql:" else url, connect)
    if scheme in REDIS:
        from .redis import RedisStore

        return RedisStore.parse(url)
    if scheme in SQLITE:
        from .sqlite import SqliteStore

        return SqliteStore.parse(url)
    # Only the scheme is repeated, and only if there is one: the rest of the URL may hold a password.
    known = ", ".join(f"{each}://" for each in (*POSTGRESQL, *REDIS)) + ", sqlite:///"
    named = f" {scheme!r}" if "://" in url else ""
    raise ConfigurationError(f"Unknown store URL scheme{named}.", hint=f"use one of {known}.")
