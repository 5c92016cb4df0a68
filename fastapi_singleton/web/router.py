"""The status over HTTP. The routes close over their singleton: lifespan state is not there in every way of serving."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, HTTPException, Query

from ..errors import StoreError
from ..records import MOST_ATTEMPTS, RunView, Status


@dataclass(frozen=True)
class RunsPage:
    """Some of a job's runs, the newest first; `before` for the next page, or null on the last."""

    job: str
    runs: list[RunView]
    next_before: datetime | None


class Runs(Protocol):
    async def __call__(self, job: str, *, limit: int, before: datetime | None) -> list[RunView]: ...


def make_router(
    status: Callable[[], Awaitable[Status]], runs: Runs, *, prefix: str, dependencies: Sequence[Any]
) -> APIRouter:
    router = APIRouter(prefix=prefix, dependencies=list(dependencies), tags=["scheduler"])

    @router.get("/status", response_model=Status, summary="Who leads, who stands by, what is wrong")
    async def scheduler_status() -> Status:
        """200 whenever this worker can answer, also while the store is away: then `backend.reachable` is false."""
        return await status()

    @router.get("/jobs/{job_id:path}/runs", response_model=RunsPage, summary="What became of a job's ticks")
    async def scheduler_job_runs(
        job_id: str,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
        before: Annotated[datetime | None, Query(description="runs scheduled before this time")] = None,
    ) -> RunsPage:
        """Read from the store: 503 while it is away, 404 for a job that nobody has heard of. All attempts of a tick are on
        one page, which may be longer than `limit` for that."""
        if before is not None and before.tzinfo is None:
            raise HTTPException(422, "before needs a time zone, such as 2026-01-31T02:30:00Z.")
        try:
            found = await runs(job_id, limit=limit + MOST_ATTEMPTS, before=before)
        except StoreError as error:
            raise HTTPException(503, str(error)) from None
        if not found and before is None and all(job.id != job_id for job in (await status()).jobs):
            raise HTTPException(404, f"There is no job {job_id!r}.")
        page = found[:limit]
        # A page does not end between two attempts of a tick: the next one begins before that tick.
        page += [run for run in found[limit:] if run.scheduled_for == page[-1].scheduled_for]
        return RunsPage(job_id, page, page[-1].scheduled_for if len(found) > len(page) else None)

    return router
