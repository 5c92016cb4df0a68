"""One leader among the workers of a FastAPI application: scheduled jobs run once, not once per worker.

The public names are imported on first use, so that the command line does not pay for FastAPI's import.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "LockHeldError",
    "LostLeadershipError",
    "NoRunError",
    "Run",
    "Singleton",
    "SingletonError",
    "Status",
    "StoreError",
    "__version__",
    "current_run",
    "job_policy",
]

if TYPE_CHECKING:
    from .errors import (
        ConfigurationError,
        LockHeldError,
        LostLeadershipError,
        NoRunError,
        SingletonError,
        StoreError,
    )
    from .jobs import current_run, job_policy
    from .records import Run, Status
    from .singleton import Singleton

_HOME = {
    "ConfigurationError": "errors",
    "LockHeldError": "errors",
    "LostLeadershipError": "errors",
    "NoRunError": "errors",
    "Run": "records",
    "Singleton": "singleton",
    "SingletonError": "errors",
    "Status": "records",
    "StoreError": "errors",
    "current_run": "jobs",
    "job_policy": "jobs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
