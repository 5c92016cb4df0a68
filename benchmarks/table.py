"""What the benchmarks print."""

from typing import NamedTuple


class Row(NamedTuple):
    what: str
    measured: str
    asked_for: str = "–"


def table(rows: list[Row]) -> str:
    cells = [Row("what", "measured", "asked for"), *rows]
    first, second, third = (max(map(len, column)) for column in zip(*cells, strict=True))
    lines = [f"{a:<{first}} | {b:<{second}} | {c}" for a, b, c in cells]
    lines.insert(1, f"{'-' * first}-|-{'-' * second}-|-{'-' * third}")
    return "\n".join(lines)
