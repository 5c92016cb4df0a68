"""For the code of a job: which run it is in, and what is to happen when a run is cut short."""

import math
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from .errors import ConfigurationError, NoRunError
from .records import Run

_current: ContextVar[Run | None] = ContextVar("fastapi_singleton_run", default=None)
_ATTRIBUTE = "__fastapi_singleton_policy__"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def current_run() -> Run:
    """The run this code is in; in a coroutine, a thread or a process of a pool alike."""
    run = _current.get()
    if run is None:
        raise NoRunError(
            "There is no current run here.",
            hint="call current_run() inside a scheduled job; in a thread of your own, pass the run along.",
        )
    return run


def enter_run(run: Run) -> Token[Run | None]:
    """From here on, in this task or thread, `current_run()` is this run; give the token to `leave_run`."""
    return _current.set(run)


def leave_run(token: Token[Run | None]) -> None:
    _current.reset(token)


def call_as(run: Run, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call as that run. Importable, so that it also works on the other side of a process pool."""
    token = enter_run(run)
    try:
        return func(*args, **kwargs)
    finally:
        leave_run(token)


@dataclass(frozen=True)
class JobPolicy:
    on_crash: Literal["skip", "rerun"] = "skip"
    catch_up: float | None = None


def job_policy(
    *, on_crash: Literal["skip", "rerun"] = "skip", catch_up: float | None = None
) -> Callable[[_Function], _Function]:
    """On a job's function: what becomes of a run that a crash cut short (`skip`: at most once; `rerun`: again, as the
    next attempt, so at least once), and how late this job may start, in place of the singleton's `catch_up`."""
    if on_crash not in ("skip", "rerun"):
        raise ConfigurationError(f"on_crash={on_crash!r} is unknown.", hint='use on_crash="skip" or on_crash="rerun".')
    if catch_up is not None and (
        isinstance(catch_up, bool) or not isinstance(catch_up, int | float) or not 0 <= catch_up < math.inf
    ):
        raise ConfigurationError(f"catch_up={catch_up!r} is not a duration.", hint="pass seconds, 0 or more.")

    def mark(func: _Function) -> _Function:
        setattr(func, _ATTRIBUTE, JobPolicy(on_crash, catch_up))
        return func

    return mark


def policy_of(func: Any) -> JobPolicy:
    """The policy a function carries, also through functools.partial and bound methods."""
    while func is not None:
        policy = getattr(func, _ATTRIBUTE, None)
        if isinstance(policy, JobPolicy):
            return policy
        func = getattr(func, "func", None)
    return JobPolicy()
