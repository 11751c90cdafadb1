"""What was measured, section by section, each of them as it was last measured.

A whole run takes hours, so that sections are renewed one by one; each keeps with its figures
when and on what they were made.
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
    """What it was measured on."""
    rounds: int


def read(directory: Path) -> dict[str, Measured]:
    """The sections that are kept in a directory, by their names."""
    path = directory / FILE
    if not path.exists():
        return {}
    return {
        name: Measured(tuple(map(_row, told["rows"])), told["facts"], told["rounds"])
        for name, told in orjson.loads(path.read_bytes()).items()
    }


def write(directory: Path, sections: Mapping[str, Measured]) -> None:
    """Keep them."""
    told = {
        name: {
            "facts": each.facts,
            "rounds": each.rounds,
            "rows": [row.as_json() for row in each.rows],
        }
        for name, each in sections.items()
    }
    # Beside it first: a run may be broken off at any time, and this is what others left.
    beside = directory / f"{FILE}.new"
    beside.write_bytes(orjson.dumps(told, option=orjson.OPT_INDENT_2) + b"\n")
    beside.replace(directory / FILE)


def _row(told: dict[str, Any]) -> Row:
    target = None
    if told["target"] is not None:
        bound, _, value = told["target"].rpartition(" ")
        target = Target(bound, float(value))
    return Row(
        told["section"],
        told["name"],
        told["unit"],
        Samples(tuple(told["ours"])),
        told["beside"],
        Samples(tuple(told["beside_values"])),
        why_not=told["why_not"],
        relation="ratio" if "ratio" in told else "difference",
        target=target,
    )
