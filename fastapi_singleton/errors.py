"""The error tree; every error says what is wrong and what to do about it.

SingletonError
├── ConfigurationError    what the application passed in cannot work; raised where it was passed
├── LockHeldError         somebody else holds the lock; `holder` says who
├── LostLeadershipError   this run is no longer the one that may write; raised by `fence`
├── NoRunError            `current_run()` was asked outside a job; also a LookupError
└── StoreError            the store could not answer; never leaves the lifespan, shown in the status
    ├── EmptyStoreError   no worker has been there yet, and whoever merely looks makes nothing
    └── UnsafeStoreError  the store answers, but leading on it could double or lose runs: refused
"""

import re

# In user:password@host, to the last @ there is: a password may hold any of the others.
_WORD = re.compile(r"\S+")
_USER = re.compile(r"://[^:@/]*:")


class SingletonError(Exception):
    """Base of every error raised here. `hint` is the sentence that says what to do."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(f"{message} Hint: {hint}")
        self.hint = hint


def described(error: BaseException, longest: int = 2000) -> str:
    """An error of somebody else's code as it is shown and written down: without the password of a URL in it."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return _WORD.sub(_without_password, text)[:longest]


def _without_password(word: "re.Match[str]") -> str:
    """Each word is looked through once: one that is a megabyte of URLs must not hold up the process."""
    text = word.group()
    user, end = _USER.search(text), text.rfind("@")
    return f"{text[: user.end()]}***{text[end:]}" if user is not None and user.end() < end else text


class ConfigurationError(SingletonError):
    """The application asked for something that cannot work. Nothing was started or connected."""


class LockHeldError(SingletonError):
    """Somebody else holds the lock. `holder` is the label of the worker, if it is known."""

    def __init__(self, lock: str, holder: str | None) -> None:
        super().__init__(
            f"The lock {lock!r} is held by {holder or 'another worker'}.", hint="try again later, or pass wait=."
        )
        self.holder = holder


class LostLeadershipError(SingletonError):
    """The run was given up for dead, and its writes are not wanted any more: let the transaction fail."""


class NoRunError(SingletonError, LookupError):
    """There is no current run: this code was not called by a scheduled job."""


class StoreError(SingletonError):
    """The store could not answer. Passing: the worker goes on trying."""


class UnsafeStoreError(StoreError):
    """The store answers, but a leader on it would not be the only one. The worker refuses to lead until it is mended."""


class EmptyStoreError(StoreError):
    """No worker has been there yet: there is nothing to look at."""

    def __init__(self, nothing: str) -> None:
        super().__init__(
            f"{nothing}: no worker has been here yet.", hint="see that --url names the application's store."
        )
