"""A copy of the package as a later version would be: with one more migration."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import outbox
from outbox.store.schema.migration_files import migrations
from tests.support.checkout import ROOT

if TYPE_CHECKING:
    from pathlib import Path

VERSION = "0.2.0"
LAST = migrations()[-1].version

ROLLING = f"""-- Compatible with programs of version {LAST}.

ALTER TABLE endpoint ADD COLUMN colour text NOT NULL DEFAULT 'grey';
CREATE TABLE later (id bigint PRIMARY KEY);
"""
STOP_FIRST = """-- Relays stop first.

CREATE TABLE later (id bigint PRIMARY KEY);
"""


def newer_version(directory: Path, migration: str) -> Path:
    """Write the next version, with a migration of this text; returns its directory."""
    package = directory / "newer"
    shutil.copytree(
        ROOT / "outbox", package / "outbox", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "schema", package / "schema")
    version = package / "outbox" / "version.py"
    text = version.read_text()
    assert outbox.__version__ in text
    version.write_text(text.replace(outbox.__version__, VERSION))
    (package / "schema" / f"{LAST + 1:04}_later.sql").write_text(migration)
    return package
