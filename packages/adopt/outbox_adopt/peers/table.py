"""Endpoints of home-made senders, as a table: a column for each setting.

The columns are settings of a file of endpoints, `compat` with its `compat_secret`,
`compat_header`, `compat_content`, `compat_value`, `compat_encoding` and `compat_secret_encoding`,
`compat_until`, `disabled` and `header:NAME`.  Lists are separated by spaces; an empty cell has the
default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model.endpoint_settings import SETTINGS
from outbox.core.model.setting_types import HeaderMap, Switch, TextList
from outbox.core.model.text import did_you_mean
from outbox.errors import UsageError
from outbox_adopt.peers.translation import RETRY, Translation

if TYPE_CHECKING:
    from outbox_adopt.peers.record import Record
    from outbox_adopt.peers.translation import ImportOptions

HEADER = "header:"
COMPAT = tuple(
    f"compat_{name}"
    for name in ("secret", "header", "content", "value", "encoding", "secret_encoding", "until")
)
COLUMNS = ("secret", "secret_encoding", "disabled", *COMPAT)
_TRUE, _FALSE = ("true", "yes", "t", "1"), ("false", "no", "f", "0")
"""The first letters alone are what psql writes."""


def translate(record: Record, options: ImportOptions) -> Translation:
    """Translate a row.

    Raises:
        UsageError: there is no such column, or a switch is neither true nor false.
    """
    values: dict[str, Any] = {"format": "raw", "retry": RETRY, "name": name_of(record)}
    compat: dict[str, str] = {}
    made = Translation(values)
    for column in record.values:
        if (cell := record.text(column)) is None:
            continue
        if column.startswith(HEADER):
            values.setdefault("headers", {})[column.removeprefix(HEADER)] = cell
        elif column in COMPAT:
            compat[column.removeprefix("compat_")] = cell
        elif column in ("secret", "secret_encoding"):
            values[column] = cell
        elif column != "disabled":
            values[column] = _cell(record, column, cell)
        elif _flag(record, column, cell):
            made.begin_disabled("the table says so")
    preset = values.pop("compat", None)
    if preset is not None:
        made.sign_as(preset, compat.pop("secret", ""), options, **compat)
    elif compat:
        raise UsageError(f"{record.place}: compat_{min(compat)} needs the column compat as well")
    return made


def name_of(record: Record) -> str:
    """The name of an endpoint."""
    return record.required("name")


def _cell(record: Record, column: str, cell: str) -> Any:
    setting = SETTINGS.get(column)
    if setting is None or isinstance(setting.type, HeaderMap):
        columns = [*(each for each in SETTINGS if each != "headers"), *COLUMNS, f"{HEADER}NAME"]
        hint = did_you_mean(column, columns)
        raise UsageError(f'the first line: there is no column "{column}"; {hint}')
    if isinstance(setting.type, Switch):
        return _flag(record, column, cell)
    if isinstance(setting.type, TextList):
        return cell.split()
    if setting.type.public_type in (int, float):
        try:
            return float(cell) if "." in cell else int(cell)
        except ValueError:
            raise UsageError(f"{record.place}.{column}: must be a number") from None
    return cell


def _flag(record: Record, column: str, cell: str) -> bool:
    if cell.lower() not in (*_TRUE, *_FALSE):
        raise UsageError(f"{record.place}.{column}: must be true or false")
    return cell.lower() in _TRUE
