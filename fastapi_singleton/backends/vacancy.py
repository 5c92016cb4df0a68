"""How a standby learns early that there is reason to try. All of these are hints: correctness never rests on them."""

import asyncio
import os

from ..records import LeaderView, Worker

# After a leader's death on this host its store may still need a moment to notice.
_EAGER = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256)


class Vacancy:
    """Waits for news: a message, a cut connection, the operating system's word (pidfd) that a leader on this host died."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._news = asyncio.Event()
        self._eager: list[float] = []
        self._watched: str | None = None
        self._pidfd: int | None = None

    def hear(self) -> None:
        self._news.set()

    def clear(self) -> None:
        """To be called before the store is asked: what is heard from now on may be newer than its answer."""
        self._news.clear()

    async def wait(self, timeout: float) -> None:
        if self._eager:
            timeout = min(timeout, self._eager.pop(0))
        try:
            async with asyncio.timeout(timeout):
                await self._news.wait()
        except TimeoutError:
            pass

    def watch(self, leader: LeaderView | None) -> None:
        """Ask the operating system to tell when this leader dies, if it is a process of this host; None: no more."""
        here = self._worker
        wanted = leader is not None and leader.hostname == here.hostname and leader.pid != here.pid
        label = leader.worker if leader is not None and wanted else None
        if label == self._watched:
            return
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._watched = label
        self._eager.clear()
        if leader is None or label is None or not hasattr(os, "pidfd_open"):
            return
        try:
            self._pidfd = os.pidfd_open(leader.pid)
        except ProcessLookupError:
            self._eager = list(_EAGER)
        except OSError:
            pass
        else:
            asyncio.get_running_loop().add_reader(self._pidfd, self._died)

    def _died(self) -> None:
        if self._pidfd is not None:  # readable for ever from now on: once heard is enough
            asyncio.get_running_loop().remove_reader(self._pidfd)
        self._eager = list(_EAGER)
        self._news.set()
