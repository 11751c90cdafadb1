"""The file: a record for each endpoint.

    {"version": 1, "endpoints": [{"source": "svix", …}, {"source": "outpost", …}]}

Other senders have no export with endpoints and secrets, so a script collects the responses of their
APIs: docs/howto/move-in-from-svix.md and its neighbours have it.  A file whose name ends in .csv is
a table, with a row for each endpoint.
"""

from __future__ import annotations

import csv
import io
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

    translate: Callable[[Record, ImportOptions], Translation]
    members: Sequence[str]
    """The members of its records; empty: the translator knows."""


SOURCES = {
    "svix": Source(svix.translate, svix.MEMBERS),
    "convoy": Source(convoy.translate, convoy.MEMBERS),
    "outpost": Source(outpost.translate, outpost.MEMBERS),
    "csv": Source(table.translate, ()),
}


def read_records(path: str) -> list[Record]:
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
    records = [
        Record(each.values, f"endpoints[{n}]") for n, each in enumerate(file.objects("endpoints"))
    ]
    for each in records:
        source = SOURCES.get(each.required("source"))
        if source is None:
            raise UsageError(f"{each.place}.source: must be one of {', '.join(SOURCES)}")
        known = ("source", *source.members) if source.members else each.values
        for name in each.values:
            if name not in known:
                there = ", ".join(source.members)
                found = truncate(name)
                raise UsageError(f'{each.place}: has no member "{found}"; there are {there}')
    return records


def _read_table(path: str) -> list[Record]:
    rows = csv.DictReader(io.StringIO(read_text(path, IMPORT_BYTES_MAX)), strict=True)
    records = []
    try:
        for row in rows:
            place = f"line {rows.line_num}"
            if None in row or None in row.values():
                raise UsageError(f"{place}: has another number of cells than the first line")
            records.append(Record({**row, "source": "csv"}, place))
    except csv.Error as error:
        raise UsageError(f"line {rows.reader.line_num}: {error}") from None
    return records
