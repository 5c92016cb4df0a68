"""Coroutines that run only while this worker leads: cancelled on loss, started again with backoff when they fail."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence

from .election import Duties
from .errors import ConfigurationError, described
from .records import JobView, Term

logger = logging.getLogger("fastapi_singleton")

TaskFunction = Callable[[], Awaitable[object]]
_LONGEST_PAUSE = 60.0
_PATIENCE = 0.5
_LONGEST_ERROR = 200


class TaskDuties(Duties):
    """The leader's tasks. The status shows each as a job whose trigger says how it is doing."""

    def __init__(self) -> None:
        self._functions: dict[str, TaskFunction] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._states: dict[str, str] = {}
        self._held_up: set[str] = set()
        self.problems: list[str] = []

    def add(self, func: TaskFunction) -> None:
        if not inspect.iscoroutinefunction(func):
            raise ConfigurationError(
                f"{getattr(func, '__name__', func)!r} is not a coroutine function.",
                hint="@singleton.task goes on an `async def` function without arguments.",
            )
        if _needs_arguments(func):
            raise ConfigurationError(
                f"{func.__name__!r} needs arguments, and a task is called without any.",
                hint="give them defaults, or use functools.partial inside a function without arguments.",
            )
        name = f"{func.__module__}:{func.__qualname__}"
        if name in self._functions:
            raise ConfigurationError(f"There are two tasks {name!r}.", hint="define each of them once.")
        self._functions[name] = func

    async def take_up(self, term: Term) -> None:
        # One that has not ended yet (it does not heed its cancellation) must not run beside its successor; nor may it keep
        # the leader from everything else.
        if self._running:
            await asyncio.wait(self._running.values(), timeout=_PATIENCE)
        self._held_up = {name for name, task in self._running.items() if not task.done()}
        self._complain()
        for problem in self.problems:
            logger.error("%s", problem)
        for name in self._functions:
            if name in self._held_up:
                self._states[name] = "still running, though it was cancelled"
            else:
                self._start(name)

    def renewed(self) -> None:
        """A task that took long over its cancellation is started again as soon as it has ended."""
        for name in [name for name in self._held_up if self._running[name].done()]:
            self._held_up.discard(name)
            self._start(name)
            self._complain()

    def _start(self, name: str) -> None:
        work = self._run(name, self._functions[name])
        self._running[name] = asyncio.create_task(work, name=f"fastapi_singleton:task:{name}")

    def _complain(self) -> None:
        self.problems = [
            f"The task {name} goes on after its cancellation, so it is not started again before it has ended. "
            "Hint: let CancelledError pass."
            for name in self._functions
            if name in self._held_up
        ]

    def lay_down(self) -> None:
        self._held_up.clear()
        for task in self._running.values():
            if not task.cancelling():  # told once: a second time would cut short what it tidies up
                task.cancel()

    def jobs(self) -> Sequence[JobView]:
        return [JobView(name, f"task, {self._states.get(name, 'starting')}", None, False) for name in self._functions]

    async def close(self, timeout: float) -> None:
        """Wait for what was cancelled, that long at most."""
        self.lay_down()
        if self._running:
            await asyncio.wait(self._running.values(), timeout=timeout)

    async def _run(self, name: str, func: TaskFunction) -> None:
        failures = 0
        while True:
            self._states[name] = f"running after {failures} failure(s)" if failures else "running"
            try:
                await func()
            except (Exception, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    if isinstance(error, asyncio.CancelledError):
                        raise  # meant for this task, not come out of what it awaits
                    # It failed while it was cleaning up: it was told to end, so it must not begin again.
                    logger.exception("The leader's task %s failed while it was cancelled", name, extra={"task": name})
                    return
                failures += 1
                logger.exception("The leader's task %s failed and will be started again", name, extra={"task": name})
                self._states[name] = f"failed {failures} time(s), last: {described(error, _LONGEST_ERROR)}"
            else:
                self._states[name] = "finished"
                return
            await asyncio.sleep(min(_LONGEST_PAUSE, 0.5 * 2.0 ** min(failures, 10)))


def _needs_arguments(func: TaskFunction) -> bool:
    given = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(
        parameter.default is parameter.empty and parameter.kind not in given
        for parameter in inspect.signature(func).parameters.values()
    )
