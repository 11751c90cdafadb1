"""How many cases each tier has: a figure that does not fall without a reason.

A pytest plugin.  A test that is lost fails nowhere: a file that is no longer collected, a name that
no longer begins with `test_`, a table of parameters that has become short.  `tests/cases.toml` has
the cases that were ever made, by folder and tier, and each removal with the test that covers what
the removed one did.  `--check-cases` compares it with each folder that a run collects as a whole;
`--write-cases` adds the new cases to it, and runs nothing.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.tiers import is_unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
LEAVES = ROOT / "packages"
FILE = TESTS / "cases.toml"
RUN = ("unit", "default", "full")
"""The tiers that have a figure; --soak has the cases of --full."""
TOP = "top"
"""The name for modules that are in no folder."""

_MAJOR = re.compile(r"(?<=[\[-])pg\d+(?=[\]-])")
_HEADER = """\
# The cases of each tier that were ever made, by folder; `python3 run.py test --write-cases` adds
# new ones.  A case that is removed, or leaves a tier, stays counted: [[removed]] says which tests
# cover what it did.
"""

Counts = Counter[tuple[str, str]]
"""Cases by folder and tier."""


def count(items: Iterable[pytest.Item]) -> Counts:
    """Count the cases of each tier; one that runs on several majors counts once."""
    cases = {_MAJOR.sub("", item.nodeid): item for item in items}
    counts: Counts = Counter()
    for item in cases.values():
        folder = _folder(item.path)
        is_full = item.get_closest_marker("full") is not None
        here = {"unit": is_unit(item), "default": not is_full, "full": True}
        counts.update((folder, tier) for tier in RUN if here[tier])
    return counts


def _folder(path: Path) -> str:
    """Return a folder of tests by name, or the name of a leaf."""
    above, name = path.relative_to(ROOT).parts[:2]
    assert above in (TESTS.name, LEAVES.name), path
    return TOP if name.endswith(".py") else name


def folders() -> dict[str, Path]:
    """Return all folders of tests, by name."""
    places = {each.name: each for each in TESTS.iterdir()}
    places |= {each.parent.name: each for each in LEAVES.glob("*/tests")}
    return {name: each for name, each in places.items() if any(each.glob("**/test_*.py"))}


def expected(content: Mapping[str, Any]) -> Counts:
    """Return the cases that `cases.toml` expects."""
    counts = Counter(
        {
            (folder, tier): figures[tier]
            for folder, figures in content["made"].items()
            for tier in RUN
        }
    )
    for each in content.get("removed", []):
        counts.subtract({(each["folder"], tier): each["cases"] for tier in each["tiers"]})
    return counts


def differences(there: Counts, wanted: Counts, folders: Iterable[str]) -> list[str]:
    """Return a line for each figure of these folders that differs."""
    return [
        f"{folder}, tier {tier}: {there[folder, tier]} cases, "
        f"{wanted[folder, tier]} in tests/cases.toml"
        for folder in sorted(folders)
        for tier in RUN
        if there[folder, tier] != wanted[folder, tier]
    ]


def whole_folders(config: pytest.Config) -> set[str]:
    """Return the folders of tests that a run collects as a whole."""
    option = config.option
    if option.keyword or option.markexpr or option.deselect or option.lf:
        return set()
    asked = {Path(argument).resolve() for argument in config.args if "::" not in argument}
    ignored = {Path(path).resolve() for path in option.ignore or ()}
    whole = {
        name
        for name, each in folders().items()
        if each not in ignored and asked & {each, *each.parents}
    }
    return whole | {TOP} if asked & {TESTS, *TESTS.parents} else whole


class Cases:
    """Counts what is collected."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._differences: list[str] = []

    @pytest.hookimpl(tryfirst=True)  # Before any test is left out.
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        there, folders = count(items), whole_folders(self._config)
        is_writing = self._config.getoption("--write-cases")
        if is_writing:
            write(there, folders)
        wanted = expected(tomllib.loads(FILE.read_text("utf-8")))
        self._differences = differences(there, wanted, folders)
        if is_writing:
            items.clear()

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode(bool(self._differences))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._differences:
            terminalreporter.write_line(line, red=True)
        if self._differences:
            terminalreporter.write_line(
                "More: python3 run.py test --write-cases. Fewer: add [[removed]] to "
                "tests/cases.toml, with the tests that cover what the removed ones did."
            )


def write(there: Counts, folders: Iterable[str]) -> None:
    """Add the cases that are new to the file; figures do not fall."""
    text = FILE.read_text("utf-8") if FILE.exists() else "[made]\n"
    content = tomllib.loads(text)
    wanted = expected(content)
    made: dict[str, dict[str, int]] = content["made"]
    for folder in folders:
        figures = made.setdefault(folder, dict.fromkeys(RUN, 0))
        for tier in RUN:
            figures[tier] += max(0, there[folder, tier] - wanted[folder, tier])
    lines = [
        f"{folder} = {{ {', '.join(f'{tier} = {figures[tier]}' for tier in RUN)} }}"
        for folder, figures in sorted(made.items())
    ]
    _, mark, removed = text.partition("\n[[removed]]")
    FILE.write_text("\n".join([_HEADER + "[made]", *lines, ""]) + mark + removed, "utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("outbox")
    group.addoption(
        "--check-cases",
        action="store_true",
        help="compare the cases with tests/cases.toml, too",
    )
    group.addoption(
        "--write-cases", action="store_true", help="add new cases to tests/cases.toml, run nothing"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--check-cases") or config.getoption("--write-cases"):
        config.pluginmanager.register(Cases(config), "cases")
