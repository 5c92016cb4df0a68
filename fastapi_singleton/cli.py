"""The command line. Exit codes: 0 done, 2 wrong usage."""

import argparse
from collections.abc import Sequence

from . import __version__


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fastapi-singleton", description="One leader among the workers of a FastAPI application."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    schema = commands.add_parser(
        "schema",
        help="print the SQL that creates the tables",
        description="Print the SQL that an administrator runs where the application's role may not create tables.",
    )
    schema.add_argument("--role", default="your_application_role", help="the role the application connects as")
    arguments = parser.parse_args(argv)
    return _schema(arguments.role)


def _schema(role: str) -> int:
    from .backends.postgres.schema import schema_sql

    print(schema_sql(role))
    return 0
