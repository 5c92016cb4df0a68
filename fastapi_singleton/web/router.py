"""The status over HTTP. The routes close over their singleton: lifespan state is not there in every way of serving."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter

from ..records import Status


def make_router(status: Callable[[], Awaitable[Status]], *, prefix: str, dependencies: Sequence[Any]) -> APIRouter:
    router = APIRouter(prefix=prefix, dependencies=list(dependencies), tags=["scheduler"])

    @router.get("/status", response_model=Status, summary="Who leads, who stands by, what is wrong")
    async def scheduler_status() -> Status:
        """200 whenever this worker can answer, also while the store is away: then `backend.reachable` is false."""
        return await status()

    return router
