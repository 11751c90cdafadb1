"""The file: a record for each endpoint.

    {"version": 1, "endpoints": [{"source": "svix", …}, {"source": "outpost", …}]}

Other senders have no export with endpoints and secrets, so a script collects the responses of their
APIs: docs/howto/move-in-from-svix.md and its neighbours have it.  A file whose name ends in .csv is
a table, with a row for each endpoint.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from outbox.cli.document import read_document, read_text
from outbox.core.model.text import quoted, truncate
from outbox.errors import UsageError
from outbox_adopt.peers import convoy, outpost, svix, table
from outbox_adopt.peers.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox_adopt.peers.translation import ImportOptions, Translation

VERSION = 1
IMPORT_BYTES_MAX = 64 * 1024 * 1024
"""Some thousand endpoints with all that an API says of them take a few MB."""


class Source(NamedTuple):
    """Where endpoints come from."""

    name_of: Callable[[Record], str]
    translate: Callable[[Record, ImportOptions], Translation]
    members: Sequence[str]
    """The members of its records; empty: the translator knows."""


SOURCES = {
    "svix": Source(svix.name_of, svix.translate, svix.MEMBERS),
    "convoy": Source(convoy.name_of, convoy.translate, convoy.MEMBERS),
    "outpost": Source(outpost.name_of, outpost.translate, outpost.MEMBERS),
    "csv": Source(table.name_of, table.translate, ()),
}


class SourcedRecord(NamedTuple):
    """A record with what it is."""

    source: Source
    record: Record


def read_records(path: str) -> list[SourcedRecord]:
    """The records of a file.

    Raises:
        UsageError: the file cannot be read, or is not one of these.
    """
    if Path(path).suffix.lower() == ".csv":
        return _read_table(path)
    file = Record(read_document(path, IMPORT_BYTES_MAX), "the file")
    if file.values.get("version") != VERSION:
        found = quoted(file.values.get("version"))
        raise UsageError(f"version: must be {VERSION}, not {found}")
    records = [_sourced(n, each.values) for n, each in enumerate(file.objects("endpoints"))]
    if not records:
        raise UsageError("endpoints: has none; was all of it collected?")
    return records


def _sourced(number: int, values: object) -> SourcedRecord:
    record = Record(values, f"endpoints[{number}]")
    source = SOURCES.get(record.required("source"))
    if source is None:
        raise UsageError(f"{record.place}.source: must be one of {', '.join(SOURCES)}")
    rest = {name: value for name, value in record.values.items() if name != "source"}
    for name in rest if source.members else ():
        if name not in source.members:
            there, found = ", ".join(source.members), truncate(name)
            raise UsageError(f'{record.place}: has no member "{found}"; there are {there}')
    return SourcedRecord(source, Record(rest, record.place))


def _read_table(path: str) -> list[SourcedRecord]:
    # Spreadsheets begin a file with a mark of its encoding.
    text = read_text(path, IMPORT_BYTES_MAX).removeprefix("\ufeff")
    rows = csv.DictReader(io.StringIO(text), strict=True)
    records = []
    try:
        columns = rows.fieldnames or ()
        for name in ("name", "url"):
            if name not in columns:
                raise UsageError(
                    f"the first line: has no column {name}; columns are separated by commas"
                )
        if twice := [each for each, times in Counter(columns).items() if times > 1]:
            raise UsageError(f"the first line: has the column {twice[0]} twice")
        for row in rows:
            place = f"line {rows.line_num}"
            if None in row or None in row.values():
                raise UsageError(f"{place}: has another number of cells than the first line")
            records.append(SourcedRecord(SOURCES["csv"], Record(row, place)))
    except csv.Error as error:
        raise UsageError(f"line {rows.reader.line_num}: {error}") from None
    if not records:
        raise UsageError("the table has no endpoint")
    return records
