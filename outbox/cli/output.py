"""Output on stdout: tables, name-value pairs and JSON.

A terminal gets rich tables, a pipe gets the same rows as aligned plain text, and
`--json` prints one line.  Control characters in values are escaped, so data from
events and receivers cannot control the terminal.  All output of commands goes through `echo`.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
import orjson

from outbox.core.model import duration
from outbox.core.model.text import count, safe, safe_lines
from outbox.operations.rows import JsonText, encode_other

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

# Columns that are dropped on a narrow terminal, in this order; --json has all of them.
DISPENSABLE = ("attempts", "status", "version", "tenant", "lane", "lanes", "types", "relay")

# Columns that may be shortened with an ellipsis, and their minimum width.
SHORTEST = {"url": 16, "types": 10, "type": 10, "endpoint": 12, "name": 12, "relay": 12}

# Columns of sentences, which are wrapped at spaces, and their minimum width.
SENTENCES = {"guarantee": 30}

# Begins a control sequence of `style`: no value can have it, because it differs in each process.
_OWN_ESCAPE = f"\x0e{os.urandom(8).hex()}"

_COLUMN_GAP = 2
_FOLD_CHARS_MIN = 30


def echo(*lines: str, err: bool = False) -> None:
    """Print lines, or an empty one; control characters are escaped, but for those of `style`."""
    for line in lines or ("",):
        text = "\x1b".join(map(safe, line.split(_OWN_ESCAPE)))
        click.echo(text, err=err)  # noqa: TID251 (this is the place)


def emit_document(text: str) -> None:
    """Print the text of a file: exactly, unless it goes to a terminal."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    click.echo(safe_lines(text) if is_terminal else text, nl=False)  # noqa: TID251 (a file's text)


def emit_json(value: Any) -> None:
    """Print one line of JSON; times in RFC 3339, dataclasses as objects."""
    # asyncpg returns its own UUID class, which orjson does not serialize.
    text = orjson.dumps(value, default=encode_other, option=orjson.OPT_UTC_Z).decode()
    echo(text)


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """Print rows under headings; without rows print `empty`."""
    if not rows:
        echo(empty)
        return
    cells, numeric = _cells(columns, rows)
    if sys.stdout is not None and sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        table, left_out = _rich_table(columns, rows, console.width)
        console.print(table)
        if left_out:
            echo(style(f"not shown at this width: {', '.join(left_out)}", dim=True))
    else:
        _plain_table(columns, cells, numeric)


def emit_pairs(*sections: Sequence[tuple[str, Any]]) -> None:
    """Print one name and value per line, and a blank line between sections; None is omitted."""
    width = max(len(name) for pairs in sections for name, value in pairs if value is not None)
    for number, pairs in enumerate(sections):
        if number:
            echo()
        for name, value in pairs:
            if value is not None:
                echo(f"{style(name.ljust(width), dim=True)}  {cell(value)}")


def print_changed(changed: Mapping[str, tuple[str, str]], *, indent: int) -> None:
    """Print changed settings, each with its old and its new value."""
    for name, (old, new) in changed.items():
        echo(f"{' ' * indent}{name}: {old} -> {new}")


def style(text: str, **styles: Any) -> str:
    """Style text with click, unless NO_COLOR is set (no-color.org)."""
    text = safe(text)
    if os.environ.get("NO_COLOR"):
        return text
    return click.style(text, **styles).replace("\x1b", _OWN_ESCAPE)


_STATE_COLOURS = {
    "delivered": "green", "replayed": "green", "pending": "yellow", "replaying": "yellow",
}  # fmt: skip


def style_state(state: str, reason: str | None = None) -> str:
    """The state of a delivery, with the reason of a dead letter, coloured by what it means."""
    return style(state_text(state, reason), fg=_STATE_COLOURS.get(state, "red"))


def state_text(state: str, reason: str | None = None) -> str:
    """Its text without a colour, for tables."""
    text = state.replace("_", " ")
    return f"{text} ({reason})" if reason else text


NEVER_YEAR = 9999
"""Times from this year on mean "never": PostgreSQL's infinity becomes the last one of Python."""


def cell(value: Any) -> str:
    """A value as human-readable text on one line."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        if value.year >= NEVER_YEAR:
            return "never"
        return value.astimezone().isoformat(sep=" ", timespec="seconds")
    if isinstance(value, list | tuple):
        return " ".join(map(cell, value))
    if isinstance(value, dict | JsonText):
        return safe(orjson.dumps(value, default=encode_other).decode())
    return safe(str(value))


def attempts_cell(attempts: int, probes: int) -> str:
    """Attempts of a delivery as a cell; probes do not count toward the retry limit."""
    return f"{attempts} ({count(probes, 'probe')})" if probes else f"{attempts}"


def describe_payload(size_bytes: int | None, content_type: str | None) -> str | None:
    """A payload's size and type, instead of its content; None: it was erased."""
    if size_bytes is None:
        return None
    size = count(size_bytes, "byte")
    return size if content_type is None else f"{size} of {content_type}"


def terminal_width() -> int | None:
    """The width of stdout's terminal in characters; None if stdout is no terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def fold(text: str, margin: int = 0) -> list[str]:
    """Wrap a sentence to the terminal's width, at spaces only."""
    width = terminal_width()
    if width is None:
        return [safe(text)]
    room = max(width - margin, _FOLD_CHARS_MIN)
    # A command that is broken inside a word cannot be copied.
    return textwrap.wrap(safe(text), room, break_long_words=False, break_on_hyphens=False)


def age(seconds: float | None) -> str | None:
    """A rounded duration, if there is one."""
    return None if seconds is None else duration.rounded(seconds)


def clock_time(at: datetime) -> str:
    """A time to the minute, in its own time zone."""
    return at.isoformat(sep=" ", timespec="minutes")


def _rich_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int
) -> tuple[Table, list[str]]:
    """A table for a terminal of this width, and the names of the columns that do not fit.

    Words are not broken: less important columns are shortened first, then dropped.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    cells, numeric = _cells(columns, rows)
    naturals = [
        max(map(cell_len, (column, *(row[i] for row in cells)))) for i, column in enumerate(columns)
    ]
    widths = fit(columns, naturals, width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, chars in widths.items():
        table.add_column(
            columns[i],
            justify="right" if numeric[i] else "left",
            overflow="ellipsis" if columns[i] in SHORTEST else "fold",
            no_wrap=columns[i] in SHORTEST,
            width=chars,
        )
    for row in cells:
        table.add_row(*(Text(row[i]) for i in widths))
    return table, [column for i, column in enumerate(columns) if i not in widths]


def fit(columns: Sequence[str], naturals: Sequence[int], room: int) -> dict[int, int]:
    """The width of each visible column, by its index.

    Args:
        naturals: the width of each column's longest cell.
        room: the width of the terminal.
    """
    kept = dict(enumerate(naturals))
    spare = [columns.index(name) for name in DISPENSABLE if name in columns]
    while (widths := _squeezed(columns, kept, room)) is None:
        if not spare:
            return kept  # Too narrow for even the required columns; rich wraps them.
        del kept[spare.pop(0)]
    return widths


def _squeezed(columns: Sequence[str], naturals: dict[int, int], room: int) -> dict[int, int] | None:
    """Widths that fit, shrinking the widest shrinkable columns; None if they cannot fit."""
    least = SHORTEST | SENTENCES
    widths = dict(naturals)
    over = sum(widths.values()) + _COLUMN_GAP * (len(widths) - 1) - room
    while over > 0:
        giving = [i for i, chars in widths.items() if chars > least.get(columns[i], chars)]
        if not giving:
            return None
        widths[max(giving, key=widths.__getitem__)] -= 1
        over -= 1
    return widths


def _cells(
    columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> tuple[list[list[str]], list[bool]]:
    cells = [[cell(value) for value in row] for row in rows]
    return cells, [any(isinstance(row[i], int) for row in rows) for i in range(len(columns))]


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
        echo(line.rstrip())
