"""What each job is called in the whole fleet, where APScheduler's own ids may be random."""

import hashlib
from typing import Any

from . import stock

_LONGEST = 400  # characters, of up to four bytes each, beside a fleet's name of two hundred


class Names:
    """A name per job: its id, or its function where APScheduler made up the id. No two jobs have the same."""

    def __init__(self, scheduler: Any, *, racing: bool = False) -> None:
        self._scheduler = scheduler
        self._racing = racing
        self._by_id: dict[str, str] = {}
        self._taken: set[str] = set()
        self.defined: set[str] = set()

    def define(self, job: Any, alias: str) -> str | None:
        """Name a job that the application defines; None if the name is taken, so that no worker could tell the two apart."""
        name = self._natural(job, alias)
        if name in self._taken:
            return None
        self.defined.add(name)
        self._give(job, name)
        return name

    def of(self, job: Any) -> str:
        """The name of a job. Of several added at run time from one function, the first has the function's name and the
        others, which no other worker has, their own ids. In a race each of them has its own, because others may add theirs."""
        name = self._by_id.get(job.id)
        if name is None:
            name = self._natural(job, job._jobstore_alias)
            self._give(job, name if name not in self._taken and not self._racing else _writable(job.id))
        return self._by_id[job.id]

    def removed(self, job_id: str) -> str:
        """The name of a job that the application has removed; it may be given again."""
        name = self._by_id.pop(job_id, job_id)
        self._taken.discard(name)
        return name

    def done(self, job_id: str) -> None:
        """A job has had its last tick. The next one from its function must not be taken for it."""
        if self._by_id.pop(job_id, None) == job_id:
            self._taken.discard(job_id)

    def _natural(self, job: Any, alias: str) -> str:
        return _writable(stock.job_key(job, shared=stock.is_shared(self._scheduler, alias)))

    def _give(self, job: Any, name: str) -> None:
        self._by_id[job.id] = name
        self._taken.add(name)


def _writable(name: str) -> str:
    """What every store can write down: a lone surrogate or a NUL, if there is one, spelt out; not longer than an index takes."""
    name = name.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 33]}-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"
