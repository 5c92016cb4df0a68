"""Every duration of the election, derived from the one knob `lease`.

The chain that keeps two leaders apart, for a lease L counted from when a request was *sent*:

    renewals start every L/4, each may take L/4   →  one slow answer is survived, a dead store is noticed by L/2
    the leader trusts itself until        0.9 L   →  it stops before the store would let anybody else in
    the store lets somebody else in from  1.0 L   →  `margin` (L/10) covers clock drift and a slow local clock read
"""

import math
import random
import time
from dataclasses import dataclass

from .errors import ConfigurationError

MIN_LEASE = 0.2
MAX_LEASE = 86_400.0


def boot_clock() -> float:
    """Seconds on a clock that goes on while the machine is suspended, as the store's clock does; monotonic() may stop."""
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


@dataclass(frozen=True)
class Timing:
    """What is derived from `lease`; validated once, here."""

    lease: float

    def __post_init__(self) -> None:
        lease = self.lease
        if isinstance(lease, bool) or not isinstance(lease, int | float) or not math.isfinite(lease):
            raise ConfigurationError(f"lease must be a number of seconds, not {lease!r}.", hint="try lease=10.0.")
        if not MIN_LEASE <= lease <= MAX_LEASE:
            raise ConfigurationError(
                f"lease={lease!r} is out of range.",
                hint=f"choose between {MIN_LEASE} and {MAX_LEASE:.0f} seconds; 10.0 suits most deployments.",
            )

    @property
    def renew_every(self) -> float:
        return self.lease / 4

    @property
    def request_timeout(self) -> float:
        return self.lease / 4

    @property
    def margin(self) -> float:
        return self.lease / 10

    @property
    def trust(self) -> float:
        """How long after *sending* a good renewal the leader may believe in itself."""
        return self.lease - self.margin

    @property
    def poll(self) -> float:
        return min(1.0, self.lease / 4)

    @property
    def worst_case_failover(self) -> float:
        """From the leader's last contact to a successor, while the store answers: the request the leader died in may
        hold the lease up for its whole time limit, the lease runs out, a standby has just polled, its try is slow too."""
        return self.request_timeout + self.lease + self.poll + self.request_timeout

    def jittered(self, seconds: float) -> float:
        """A little less than `seconds`, so that workers started together do not ask together for ever."""
        return seconds * random.uniform(0.8, 1.0)

    def backoff(self, failures: int) -> float:
        """Pause after that many failures in a row: from 50 ms up to the poll interval, with full jitter above a floor."""
        ceiling = min(self.poll, 0.05 * 2.0 ** min(failures, 10))
        return random.uniform(0.5, 1.0) * ceiling
