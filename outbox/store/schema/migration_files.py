"""Migration files: numbered plain SQL.

The first line of a file says what becomes of older programs:

- `-- Compatible with programs of version N.`: those whose last migration is N or later accept the
  newer schema, so the file is applied while relays run, and relays are replaced one by one.
- `-- Relays stop first.`: no older program accepts it.  The file is not applied while a relay runs.
  A file of the first twelve without the other line means the same.

A file is applied while producers publish: what it locks it locks for a moment, and the outbox last
(`lock_attempts`).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.errors import CannotRun

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_COMPATIBLE_FROM = re.compile(r"-- Compatible with programs of version ([0-9]+)\.\n")


@dataclass(frozen=True, slots=True)
class Migration:
    """A migration file of `schema/`."""

    version: int
    name: str
    sql: str
    checksum: str
    works_from: int
    """The oldest compatible program version (the version of its last migration)."""

    @property
    def relays_stop_first(self) -> bool:
        """Whether no older relay accepts it."""
        return self.works_from == self.version

    def __str__(self) -> str:
        """`0001_outbox`."""
        return f"{self.version:04}_{self.name}"


@cache
def table_names() -> tuple[str, ...]:
    """The tables that the migrations create, without partitions: a schema may have others."""
    changed = re.compile(r"^(CREATE|DROP) TABLE (\w+)", re.MULTILINE)
    last = {name: verb for each in migrations() for verb, name in changed.findall(each.sql)}
    return tuple(name for name, verb in last.items() if verb == "CREATE")


@cache
def migrations() -> tuple[Migration, ...]:
    """The migration files of this version, in order.

    They are part of the installed package, or beside it in a checkout.
    """
    directory: Traversable = resources.files("outbox") / "schema"
    if not directory.is_dir():
        directory = Path(__file__).resolve().parents[3] / "schema"
    found = []
    for entry in directory.iterdir():
        match = re.fullmatch(r"([0-9]{4})_(\w+)\.sql", entry.name)
        if match:
            # A checkout with other line endings contains the same migration.
            text = entry.read_text(encoding="utf-8").replace("\r\n", "\n")
            checksum = hashlib.sha256(text.encode()).hexdigest()
            version = int(match[1])
            found.append(
                Migration(version, match[2], text, checksum, read_works_from(text, version))
            )
    found.sort(key=lambda migration: migration.version)
    if [m.version for m in found] != list(range(1, len(found) + 1)) or not found:
        raise CannotRun(
            f"the installation is damaged: {directory} lacks migrations; reinstall outbox-relay"
        )
    return tuple(found)


def read_works_from(text: str, version: int) -> int:
    """The oldest compatible program version."""
    match = _COMPATIBLE_FROM.match(text)
    return int(match[1]) if match else version
