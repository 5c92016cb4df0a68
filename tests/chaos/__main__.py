"""`make chaos`: the long form. `ARGS="--store redis --seed 7 --minutes 10 --every 8"`."""

import argparse
import sys
import time

from .deployments import DEPLOYMENTS
from .storm import Storm

# Seconds: a tick may die with the worker that has claimed it, and the next one is due a period later.
LONGEST_GAP = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description="A storm of faults over four workers; fails if a tick is doubled or missed."
    )
    parser.add_argument("--store", choices=DEPLOYMENTS, default="postgresql")
    parser.add_argument("--mode", choices=("leader", "race"), default="leader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=8.0, help="seconds between two faults")
    parser.add_argument("--lease", type=float, default=2.0)
    arguments = parser.parse_args()
    with Storm(arguments.store, arguments.mode, lease=arguments.lease, seed=arguments.seed) as storm:
        end = time.monotonic() + 60 * arguments.minutes
        next_at = time.monotonic() + arguments.every / 2
        while next_at < end:
            time.sleep(max(0.0, next_at - time.monotonic()))
            fault = storm.random.choice(list(storm.faults))
            print(f"{time.strftime('%H:%M:%S')}  {fault}", flush=True)
            storm.strike(fault)
            next_at = max(next_at, time.monotonic() - arguments.every) + arguments.every * storm.random.uniform(
                0.7, 1.3
            )
        report = storm.settle()
    print(f"\n{arguments.store}, mode {arguments.mode}, seed {arguments.seed}\n{report.table()}")
    # A worker frozen in the middle of a write to a file holds up the others; docs/stores.md says so.
    if arguments.mode == "race" and arguments.store != "sqlite" and report.gap >= LONGEST_GAP:
        print(f"a gap of {report.gap:.3f} s: in a race no worker has to wait for another")
        return 1
    return 0 if report.clean else 1


if __name__ == "__main__":
    sys.exit(main())
