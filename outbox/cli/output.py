"""What people and machines read on stdout.

A terminal gets rich tables; a pipe gets the same rows as plain aligned text;
`--json` gets one line.  Text from elsewhere never steers the terminal.
"""

from __future__ import annotations

import os
import re
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def emit_json(value: Any) -> None:
    """One line; times in RFC 3339, dataclasses as objects."""
    # asyncpg's UUIDs are a class of its own, which orjson does not know.
    click.echo(orjson.dumps(value, default=str, option=orjson.OPT_UTC_Z).decode())


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """Rows under headings; without rows, a sentence that says so."""
    if not rows:
        click.echo(empty)
        return
    cells = [[cell(value) for value in row] for row in rows]
    numeric = [any(isinstance(row[i], int) for row in rows) for i in range(len(columns))]
    if sys.stdout is not None and sys.stdout.isatty():
        _rich_table(columns, cells, numeric)
    else:
        _plain_table(columns, cells, numeric)


def emit_pairs(pairs: Sequence[tuple[str, Any]]) -> None:
    """Names and values below each other; None is left out."""
    shown = [(name, cell(value)) for name, value in pairs if value is not None]
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        click.echo(f"{style(name.ljust(width), dim=True)}  {value}")


def style(text: str, **how: Any) -> str:
    """Text in click's styles, unless NO_COLOR says otherwise (no-color.org)."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **how)


def cell(value: Any) -> str:
    """A value as people read it, on one line."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().isoformat(sep=" ", timespec="seconds")
    if isinstance(value, list | tuple):
        return " ".join(map(cell, value))
    if isinstance(value, dict):
        return safe(orjson.dumps(value, default=str).decode())
    return safe(str(value))


def safe(text: str) -> str:
    """Text without characters that a terminal acts on."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def age(seconds: float | None) -> str | None:
    """A length of time in its two largest units: `3m 20s`."""
    if seconds is None:
        return None
    rest = max(int(seconds), 0)
    parts: list[str] = []
    for size, unit in _UNITS:
        if rest >= size or (unit == "s" and not parts):
            parts.append(f"{rest // size}{unit}")
        rest %= size
    return " ".join(parts[:2])


def count(number: int, noun: str) -> str:
    """`1 delivery`, `2 deliveries`."""
    if number == 1:
        return f"1 {noun}"
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number} {plural}"


def _rich_table(
    columns: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, is_numeric in zip(columns, numeric, strict=True):
        table.add_column(column, justify="right" if is_numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)


def _plain_table(
    columns: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> None:
    rows = [[column.upper().replace(" ", "_") for column in columns], *cells]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    for row in rows:
        line = "  ".join(
            text.rjust(width) if is_numeric else text.ljust(width)
            for text, width, is_numeric in zip(row, widths, numeric, strict=True)
        )
        click.echo(line.rstrip())
