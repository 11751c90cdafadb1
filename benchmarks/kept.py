"""Stored measurements, by section.

A whole run takes hours, so sections are renewed individually; each is stored with its date and
machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from benchmarks.figures import Row, Samples, Target

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILE = "results.json"


@dataclass(frozen=True, slots=True)
class Measured:
    """One section."""

    rows: tuple[Row, ...]
    facts: dict[str, str]
    """The machine that was measured."""
    rounds: int


def read(directory: Path) -> dict[str, Measured]:
    """Return the stored sections of a directory, by name."""
    path = directory / FILE
    if not path.exists():
        return {}
    return {
        name: Measured(tuple(map(_row, fields["rows"])), fields["facts"], fields["rounds"])
        for name, fields in orjson.loads(path.read_bytes()).items()
    }


def write(directory: Path, sections: Mapping[str, Measured]) -> None:
    """Store the sections."""
    fields = {
        name: {
            "facts": each.facts,
            "rounds": each.rounds,
            "rows": [row.as_json() for row in each.rows],
        }
        for name, each in sections.items()
    }
    # Written to a temporary file first: a run may be interrupted at any time, and must not lose
    # earlier results.
    temporary = directory / f"{FILE}.new"
    temporary.write_bytes(orjson.dumps(fields, option=orjson.OPT_INDENT_2) + b"\n")
    temporary.replace(directory / FILE)


def _row(fields: dict[str, Any]) -> Row:
    target = None
    if fields["target"] is not None:
        bound, _, value = fields["target"].rpartition(" ")
        target = Target(bound, float(value))
    return Row(
        fields["section"],
        fields["name"],
        fields["unit"],
        Samples(tuple(fields["ours"])),
        fields["baseline"],
        Samples(tuple(fields["baseline_values"])),
        missing_reason=fields["missing_reason"],
        relation="ratio" if "ratio" in fields else "difference",
        target=target,
    )
