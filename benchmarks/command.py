"""What `fastapi-singleton run` costs over the bare command, and what becomes of fifty that start together.

`python -m benchmarks.command [--quick]`
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from example_app.embedded_redis import EmbeddedRedis

from .table import Row, table

with warnings.catch_warnings():
    # The embedded server's package looks for a runtime directory that it is never asked to use.
    warnings.simplefilter("ignore")
    from example_app.embedded import EmbeddedPostgres

TOGETHER = 50
# The worker that has it or had it, and which run that is.
NAMES_IT = re.compile(r" by \S+:\d+:[0-9a-f]{8}\b.*\(run [0-9a-f]{32}\b.*not run here")
RUN = (sys.executable, "-m", "fastapi_singleton", "run")


@contextmanager
def stores() -> Iterator[dict[str, str]]:
    with EmbeddedPostgres() as postgres, EmbeddedRedis() as redis, tempfile.TemporaryDirectory() as directory:
        yield {"postgresql": postgres.url, "redis": redis.url, "sqlite": f"sqlite:///{directory}/store.sqlite3"}


def seconds(command: tuple[str, ...], url: str) -> float:
    began = time.perf_counter()
    subprocess.run(command, env={**os.environ, "FASTAPI_SINGLETON_URL": url}, check=True, capture_output=True)
    return time.perf_counter() - began


def overhead(kind: str, url: str, rounds: int) -> Row:
    bare = statistics.median(seconds(("true",), url) for _ in range(rounds))
    wrapped = statistics.median(seconds((*RUN, f"job-{n}", "--", "true"), url) for n in range(rounds))
    return Row(f"run over the bare command, {kind}", f"{(wrapped - bare) * 1e3:.0f} ms", "< 250 ms")


def together(kind: str, url: str, command: str, what: str) -> Row:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "ran"
        racing = [
            subprocess.Popen(
                [*RUN, f"race-{command[:5]}", "--wait", "0", "--", "sh", "-c", f"echo x >> {out}; {command}"],
                env={**os.environ, "FASTAPI_SINGLETON_URL": url}, stderr=subprocess.PIPE, text=True,
            )
            for _ in range(TOGETHER)
        ]  # fmt: skip
        said = [process.communicate()[1] for process in racing]
        ran = len(out.read_text().splitlines())
    named = sum(NAMES_IT.search(text) is not None for text in said)
    return Row(f"{TOGETHER} at once, {what}, {kind}", f"{ran} ran, {named} named the other", f"1, {TOGETHER - 1}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.command", description="What the cron wrapper costs.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 15
    rows = []
    with stores() as urls:
        for kind, url in urls.items():
            print(f"measuring: the command line on {kind} …", file=sys.stderr, flush=True)
            rows.append(overhead(kind, url, rounds))
            rows.append(together(kind, url, "sleep 5", "a command of 5 s"))
            rows.append(together(kind, url, "true", "one that ends at once"))
    print(table(rows))


if __name__ == "__main__":
    main()
