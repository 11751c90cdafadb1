"""Tiers: how much a run of the suite covers, and which markers leave a test out of one.

unit         tests that need nothing but the program: seconds
(default)    every behaviour once, on the newest PostgreSQL: minutes
--full       every PostgreSQL that is installed, and the tests marked `full`
--soak       like --full, on every supported PostgreSQL, with long random runs: hours

A test belongs to `unit` unless it uses a database, or a marker says what else it needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.mark import ParameterSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

MARKERS = {
    "system": "starts a process or opens a socket: not in the tier `unit`",
    "slow": "takes more than half a second: not in the tier `unit`",
    "full": "runs with --full and --soak only",
    "one_major": "runs on the newest PostgreSQL only",
    "costly": "like one_major, unless --pg names the majors",
    "pgbouncer": "left out where PgBouncer is not installed",
    "browser": "left out where there is no chromium",
    "promtool": "left out where Prometheus's promtool is not there",
    "mounts": "left out where no file system can be mounted",
    "image": "left out where buildah cannot build the image",
}
"""Each of them leaves a test out of the tier `unit`: all but the first two need a system as well.
"""

SLOW_S = 0.5
"""The longest that a test of the tier `unit` takes on an idle machine."""

_MODULE_MARKS = re.compile(r"^pytestmark\b[^\n]*(?:\n[ \])][^\n]*)*", re.MULTILINE)
_MARK = re.compile(r"\bmark\.(\w+)")


@dataclass(frozen=True)
class Tier:
    """What a run of the suite covers, unless an option says otherwise."""

    pg: str
    """PostgreSQL majors: none, the newest one, those that are installed, or all."""
    kills: int
    prove_minutes: float
    ledger_seconds: float
    cursor_seconds: float
    sim_seeds: int
    silences: str
    """Messages after which a relay falls silent: a number of them, or all."""
    api_examples: int
    model_size: int
    examples_max: int
    """Examples of a property test.  The number of random walks is a multiple of it."""
    is_full: bool = False
    """Whether tests marked `full` run."""
    is_unit: bool = False
    """Whether only tests that need no system run."""


TIERS = {
    "unit": Tier("none", 2, 0.2, 4.0, 4.0, 8, "8", 1, 1, 15, is_unit=True),
    "default": Tier("newest", 1, 0.2, 4.0, 4.0, 8, "8", 1, 1, 15),
    "full": Tier("installed", 3, 0.2, 6.0, 6.0, 20, "30", 2, 1, 100, is_full=True),
    "soak": Tier("all", 100, 10.0, 300.0, 120.0, 2000, "all", 20, 3, 1000, is_full=True),
}

OPTIONS = (
    ("kills", int, "kill -9 of the relay, end to end"),
    ("prove-minutes", float, "length of outbox prove, end to end"),
    ("ledger-seconds", float, "kills of relay and receiver over a ledger"),
    ("cursor-seconds", float, "length of the adversarial producers"),
    ("sim-seeds", int, "simulated hours"),
    ("silences", str, "messages after which a relay falls silent, or all"),
    ("api-examples", int, "generated requests of each kind of the API"),
    ("model-size", int, "how much of the protocols' models is explored, 1 to 3"),
)
"""Options that override a tier: name, type and what they do."""


def tier_name(config: pytest.Config) -> str:
    """Return the name of a run's tier."""
    names = [name for name in TIERS if name != "default" and config.getoption(f"--{name}")]
    return names[-1] if names else "default"


def tier_of(config: pytest.Config) -> Tier:
    """Return a run's tier."""
    return TIERS[tier_name(config)]


def is_unit(item: pytest.Item) -> bool:
    """Whether a test needs nothing but the program."""
    uses_database = "pg_major" in getattr(item, "fixturenames", ())
    return not uses_database and not any(map(item.get_closest_marker, MARKERS))


def sampled(rows: Iterable[Any], kept: int | Callable[[Any], bool] = 1) -> list[Any]:
    """Return parameters of which the default tier runs some, and --full all.

    Args:
        rows: the parameters; a tuple has the values of several names.
        kept: how many of the first ones the default tier runs, or which.
    """
    rows = list(rows)
    chosen = range(kept) if isinstance(kept, int) else [n for n, r in enumerate(rows) if kept(r)]
    return [row if n in chosen else _only_full(row) for n, row in enumerate(rows)]


def _only_full(row: Any) -> Any:
    if isinstance(row, ParameterSet):
        return pytest.param(*row.values, marks=[*row.marks, pytest.mark.full], id=row.id)
    return pytest.param(*(row if type(row) is tuple else (row,)), marks=pytest.mark.full)


def has_unit_tests(module: Path) -> bool:
    """Whether a module may have tests of the tier `unit`, by the markers of the whole module.

    Such a module is not imported in that tier: what it imports need not be installed.
    """
    return not any(
        name in MARKERS
        for marks in _MODULE_MARKS.findall(module.read_text("utf-8"))
        for name in _MARK.findall(marks)
    )
