"""The command line: `fastapi-singleton`, or `python -m fastapi_singleton`. It never imports FastAPI."""

import argparse
import asyncio
import dataclasses
import json
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from . import __version__
from .backends import Backend, Store, find_store
from .errors import ConfigurationError, EmptyStoreError, SingletonError
from .records import NEWEST, BackendView, Fleet, RunView, Status, Worker, is_name
from .timing import Timing

Answer = TypeVar("Answer")

URL_VARIABLE = "FASTAPI_SINGLETON_URL"
EXIT_CODES = (
    "Exit codes: 0 done, or not run because somebody else did (--busy-exit-code); 1 the doctor found a problem; 2 wrong usage; "
    "3 the store cannot be used. run passes on the command's own: 127 if it cannot be started, 128 + n if signal n ended it, "
    "143 if it was stopped because its lock was lost."
)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    # What follows the first -- is the command of `run`, options of its own and all.
    at = given.index("--") if "--" in given else len(given)
    parser = _parser()
    arguments, unknown = parser.parse_known_args(given[:at])
    if unknown:
        hint = ". Hint: the command goes behind a --: run NAME -- CMD ARG …" if arguments.command == "run" else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    arguments.cmd = given[at + 1 :]
    try:
        code = int(arguments.act(arguments))
        if sys.stdout is not None:  # closed, as some do for a cron line
            sys.stdout.flush()
    except SingletonError as error:
        print(f"fastapi-singleton: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 3
    except BrokenPipeError:
        # Whoever read has had enough (`| head`); the interpreter must not find that out once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    else:
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastapi-singleton",
        description="One leader among the workers of a FastAPI application, and one run per tick.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, act: Callable[[argparse.Namespace], int], help: str, *, data: bool = False) -> Any:
        made = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".", epilog=EXIT_CODES)
        made.set_defaults(act=act)
        made.add_argument("--url", help=f"the store (default: ${URL_VARIABLE}, then a SQLite file here)")
        made.add_argument("--name", type=_name, default="default", help="the fleet's name (default: %(default)s)")
        if data:
            made.add_argument("--json", action="store_true", help="print JSON")
        return made

    run = command("run", _run, "run a command under a named lock, once among all hosts, and record it")
    run.usage = "fastapi-singleton run NAME [options] -- CMD [ARG ...]"
    run.add_argument("job", metavar="NAME", type=_name, help="what the run is called in the ledger")
    run.add_argument(
        "--min-gap", type=_seconds, default=30.0, help="do not run again within so many seconds (default: 30)"
    )
    run.add_argument("--wait", type=_seconds, default=0.0, help="wait so many seconds for the lock (default: 0)")
    run.add_argument("--lease", type=float, default=10.0, help="how long the lock outlives a silent host (default: 10)")
    run.add_argument("--busy-exit-code", type=_exit_code, default=0, help="exit code if it is not run (default: 0)")
    command("status", _status, "show the leader, the workers, the jobs and their last runs", data=True)
    runs = command("runs", _runs, "show what became of ticks, the newest first", data=True)
    runs.add_argument("job", nargs="?", metavar="JOB", help="only this job's")
    runs.add_argument("--limit", type=_limit, default=50, help="at most so many (default: 50; more only with JOB)")
    command("doctor", _doctor, "look for what would keep the store from serving well", data=True)
    schema = command("schema", _schema, "print the SQL that creates the tables, for an administrator to run")
    schema.add_argument("--role", default="your_application_role", help="the role the application connects as")
    return parser


def _name(text: str) -> str:
    if not is_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a name: use a short text such as 'app'")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400 * 365:
        raise argparse.ArgumentTypeError("must be a number of seconds, 0 or more")
    return seconds


def _whole(text: str, least: int, most: int) -> int:
    number = int(text) if text.isascii() and text.isdigit() else -1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"must be a whole number between {least} and {most}")
    return number


def _limit(text: str) -> int:
    return _whole(text, 1, 10_000)


def _exit_code(text: str) -> int:
    return _whole(text, 0, 255)


def _store(arguments: argparse.Namespace) -> Store:
    return find_store(arguments.url or os.environ.get(URL_VARIABLE) or None, None)


def _run(arguments: argparse.Namespace) -> int:
    from .wrapping import Wrapped, run

    if not arguments.cmd:
        print("fastapi-singleton: no command to run. Hint: fastapi-singleton run NAME -- CMD ARG …", file=sys.stderr)
        return 2
    wrapped = Wrapped(
        arguments.name, arguments.job, arguments.cmd, arguments.lease, arguments.wait, arguments.min_gap,
        arguments.busy_exit_code,
    )  # fmt: skip
    return run(_store(arguments), wrapped)


def _look(
    arguments: argparse.Namespace, use: Callable[[Backend], Coroutine[Any, Any, Answer]], empty: Answer
) -> Answer:
    """What is found in the store; `empty` where there is none yet, because whoever merely looks makes none."""

    async def ask() -> Answer:
        backend = _store(arguments).open(arguments.name, Worker.here(role="onlooker"), Timing(10.0))
        try:
            return await use(backend)
        finally:
            await backend.close()
            backend.forfeit()

    try:
        return asyncio.run(ask())
    except EmptyStoreError as error:
        print(f"fastapi-singleton: {error}", file=sys.stderr)
        return empty


def _status(arguments: argparse.Namespace) -> int:
    async def look(backend: Backend) -> Fleet:
        await backend.look()
        return backend.fleet

    fleet, store = _look(arguments, look, Fleet()), _store(arguments)
    status = _seen_from_outside(fleet, store, arguments.name)
    if arguments.json:
        print(_json(status))
        return 0
    print(f"{arguments.name}: {status.status} on {store.detail}")
    print(_headline(fleet))
    workers = [(w.worker, w.role, _time(w.started_at), w.version) for w in fleet.workers]
    _print_table(("worker", "role", "since", "version"), workers)
    fires = status.status == "ok"  # or what was planned is planned no more
    jobs = [
        (j.id, j.trigger, "paused" if j.paused else _time(j.next_run_at if fires else None), _short(j.last_run))
        for j in fleet.jobs
    ]
    _print_table(("job", "trigger", "next run", "last run"), jobs)
    _print_runs(fleet.runs[:10])
    return 0


def _seen_from_outside(fleet: Fleet, store: Store, name: str) -> Status:
    """The one read model, as far as somebody can fill it in who is not of the fleet: what troubles a worker, and its lease,
    only that worker can tell."""
    racing = any(worker.role == "racer" for worker in fleet.workers)
    return Status(
        status="ok" if racing or fleet.leader is not None else "no_leader",
        problems=(),
        answered_by=f"{socket.gethostname()}:{os.getpid()}:{__package__}",
        name=name,
        mode="race" if racing else "leader",
        backend=BackendView(store.kind, True, store.detail),
        lease_seconds=None,
        worst_case_failover_seconds=None,
        leader=fleet.leader,
        workers=fleet.workers,
        jobs=fleet.jobs,
        runs=fleet.runs,
        versions=fleet.versions,
    )


def _headline(fleet: Fleet) -> str:
    if (leader := fleet.leader) is not None:
        return f"Leader: {leader.worker} since {_time(leader.acquired_at)} (token {leader.token})"
    racers = sum(worker.role == "racer" for worker in fleet.workers)
    return f"A race of {racers} worker(s), without a leader" if racers else "No leader"


def _runs(arguments: argparse.Namespace) -> int:
    if arguments.job is None and arguments.limit > NEWEST:
        print(
            f"fastapi-singleton: without JOB at most {NEWEST}. Hint: name the job: runs JOB --limit …", file=sys.stderr
        )
        return 2

    async def look(backend: Backend) -> Sequence[RunView]:
        if arguments.job is not None:
            return await backend.runs(arguments.job, arguments.limit)
        await backend.look()
        return backend.fleet.runs[: arguments.limit]

    nothing: Sequence[RunView] = []
    runs = _look(arguments, look, nothing)
    print(_json(runs)) if arguments.json else _print_runs(runs)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from .doctor import examine

    findings = asyncio.run(examine(_store(arguments), arguments.name))
    if arguments.json:
        print(_json(findings))
    else:
        for finding in findings:
            print(f"{finding.level:<8} {finding.text}" + (f" Hint: {finding.hint}" if finding.hint else ""))
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def _schema(arguments: argparse.Namespace) -> int:
    from .backends.postgres.schema import schema_sql

    named = arguments.url or os.environ.get(URL_VARIABLE)
    if named and (kind := find_store(named, None).kind) != "postgresql":
        print(f"fastapi-singleton: {kind} needs no schema: nothing has to be created there.", file=sys.stderr)
        return 0
    print(schema_sql(arguments.role))
    return 0


def _json(value: Any) -> str:
    def plain(each: Any) -> Any:
        return each.isoformat().replace("+00:00", "Z") if isinstance(each, datetime) else dataclasses.asdict(each)

    return json.dumps(value, default=plain, indent=2)


def _time(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}" if moment is not None else "–"


def _short(run: RunView | None) -> str:
    return f"{run.outcome} {_time(run.scheduled_for)}" if run is not None else "–"


def _print_runs(runs: Iterable[RunView]) -> None:
    _print_table(
        ("job", "scheduled for", "outcome", "cause", "attempt", "seconds", "worker", "error"),
        [
            (r.job, _time(r.scheduled_for), r.outcome, r.cause, r.attempt,
             "–" if r.duration_seconds is None else f"{r.duration_seconds:.2f}", r.worker, r.error or "")
            for r in runs
        ],
    )  # fmt: skip


def _print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    cells = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print()
    for row in cells:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    if not rows:
        print("(none)")
