"""Coroutines that run only while this worker leads: cancelled on loss, started again with backoff when they fail."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from .election import Duties
from .errors import ConfigurationError
from .records import JobView, Term

logger = logging.getLogger("fastapi_singleton")

TaskFunction = Callable[[], Awaitable[object]]
_LONGEST_PAUSE = 60.0
_LONGEST_ERROR = 200


class TaskDuties(Duties):
    """The leader's tasks. The status shows each as a job whose trigger says how it is doing."""

    def __init__(self) -> None:
        self._functions: dict[str, TaskFunction] = {}
        self._running: list[asyncio.Task[None]] = []
        self._states: dict[str, str] = {}

    def add(self, func: TaskFunction) -> None:
        if not asyncio.iscoroutinefunction(func):
            raise ConfigurationError(
                f"{getattr(func, '__name__', func)!r} is not a coroutine function.",
                hint="@singleton.task goes on an `async def` function without arguments.",
            )
        name = f"{func.__module__}:{func.__qualname__}"
        if name in self._functions:
            raise ConfigurationError(f"There are two tasks {name!r}.", hint="define each of them once.")
        self._functions[name] = func

    async def take_up(self, term: Term) -> None:
        # One that has not ended yet (it does not heed its cancellation) must not run beside its successor.
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running = [
            asyncio.create_task(self._run(name, func), name=f"fastapi_singleton:task:{name}")
            for name, func in self._functions.items()
        ]

    def lay_down(self) -> None:
        for task in self._running:
            task.cancel()

    def jobs(self) -> Sequence[JobView]:
        return [JobView(name, f"task, {self._states.get(name, 'starting')}", None, False) for name in self._functions]

    async def close(self, timeout: float) -> None:
        """Wait for what was cancelled, that long at most."""
        self.lay_down()
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)

    async def _run(self, name: str, func: TaskFunction) -> None:
        failures = 0
        while True:
            self._states[name] = f"running after {failures} failure(s)" if failures else "running"
            try:
                await func()
            except Exception as error:
                failures += 1
                logger.exception("The leader's task %s failed and will be started again", name, extra={"task": name})
                self._states[name] = f"failed {failures} time(s), last: {type(error).__name__}: {error}"[
                    :_LONGEST_ERROR
                ]
            else:
                self._states[name] = "finished"
                return
            await asyncio.sleep(min(_LONGEST_PAUSE, 0.5 * 2.0 ** min(failures, 10)))
