"""The real stores under test, and what a test may do to them behind the workers' backs."""

from datetime import datetime
from typing import Protocol

from fastapi_singleton.records import Entry


class RealStore(Protocol):
    """One empty store for one test. Its URL is all the workers know of it."""

    url: str

    async def unsee(self, name: str, worker: str) -> None:
        """As if the worker had not been seen for an hour."""

    async def expire(self, name: str) -> None:
        """End the lease of whoever leads, as if it had stood still for longer; nobody tells it."""

    async def give_up(self, name: str) -> None:
        """Mark all running runs as abandoned, as a successor's sweep would."""

    async def put(self, entry: Entry, worker: str) -> None:
        """Put a running row there, as if that worker's claim had come in just now."""

    async def set_job(
        self,
        name: str,
        key: str,
        *,
        since: datetime | None = None,
        anchor: datetime | None = None,
        removed: bool = False,
    ) -> None:
        """Change what the fleet remembers of a job."""

    async def locks_after_two_days(self) -> int:
        """Age what is remembered of locks; how many are still remembered of those that go by themselves."""

    def close(self) -> None: ...
