"""Every time that is stored or kept has a kind, a bound, and an answer to a step of the clock.

`times.toml` has one line for each column of a type of time, and for each attribute whose name or
type says that it holds a time.  A new one without a line fails, so that its author says what a
clock that was days ahead for a moment does to it; so does a line without its column or attribute.
"""

from __future__ import annotations

import ast
import re
import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.repository.sources import PACKAGES, ROOT, nodes, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.postgres import Database

KINDS = {
    "promise",
    "observed",
    "bounded",
    "monotonic",
    "measured",
    "shown",
    "setting",
    "other",
}
NEEDS_BOUND, NEEDS_STEP = {"bounded"}, {"promise", "bounded", "observed"}
TIME_NAME = r"(^|_)(s|at|until|since)$"
TIME_TYPE = re.compile(r"\b(datetime|timedelta)\b")
COLUMNS = f"""
SELECT c.relname || '.' || a.attname
  FROM pg_class c
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE c.relnamespace = 'relay'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
   AND (format_type(a.atttypid, NULL) ~ '^(timestamp|date|time|interval|tstz|ts)'
        OR a.attname ~ '{TIME_NAME}')
"""

TABLE: dict[str, Any] = tomllib.loads((ROOT / "tests/repository/times.toml").read_text())


class Attribute(NamedTuple):
    """An attribute that holds a time."""

    name: str
    """Module, class and attribute, without `outbox.`."""
    type: str
    """Its annotation; empty: it has none."""


class Rule(NamedTuple):
    """Attributes that need no entry of their own."""

    name: re.Pattern[str]
    type: re.Pattern[str]

    def covers(self, attribute: Attribute) -> bool:
        name_fits = self.name.fullmatch(attribute.name)
        return bool(name_fits and self.type.fullmatch(attribute.type))


RULES = [Rule(re.compile(r["name"]), re.compile(r.get("type", ".*"))) for r in TABLE["rules"]]


def attributes_of(module: str, syntax: Sequence[ast.AST]) -> Iterator[Attribute]:
    """The attributes of a module's classes that hold a time."""
    for each in syntax:
        if isinstance(each, ast.ClassDef):
            for name, kind in _declared(each):
                if re.search(TIME_NAME, name) or TIME_TYPE.search(kind):
                    yield Attribute(f"{module}.{each.name}.{name}", kind)


def _declared(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The fields of a class, and what its methods assign to `self`, with the annotations."""
    found: dict[str, str] = {}
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign):
            targets, kind = [each.target], ast.unparse(each.annotation)
        elif isinstance(each, ast.Assign):
            targets, kind = each.targets, ""
        else:
            continue
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                match part:
                    case ast.Name(id=name) if kind and each in node.body:
                        pass
                    case ast.Attribute(value=ast.Name(id="self"), attr=name):
                        pass
                    case _:
                        continue
                found[name] = kind or found.get(name, "")
    yield from found.items()


def attributes() -> list[Attribute]:
    found = []
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            found += attributes_of(module.removeprefix("outbox."), nodes(path))
    return found


def test_every_attribute_that_holds_a_time_has_an_entry() -> None:
    names = {each.name for each in attributes() if not any(r.covers(each) for r in RULES)}
    listed = TABLE["attributes"].keys()
    assert names - listed == set(), "add them to times.toml: what does a step of the clock do?"
    assert listed - {each.name for each in attributes()} == set(), "remove them from times.toml"


@pytest.mark.one_major
async def test_every_column_of_a_time_has_an_entry(database: Database) -> None:
    async with database.at_hand() as db:
        found = {row[0] for row in await db.fetch(COLUMNS)}
    listed = TABLE["columns"].keys()
    assert found - listed == set(), "add them to times.toml: what does a step of the clock do?"
    assert listed - found == set(), "remove them from times.toml"


def test_every_entry_says_what_its_kind_requires() -> None:
    wrong = []
    for name, (kind, bound, step) in (TABLE["columns"] | TABLE["attributes"]).items():
        if kind not in KINDS:
            wrong.append(f"{name}: there is no kind {kind}")
        if kind in NEEDS_BOUND and not bound:
            wrong.append(f"{name}: what bounds it when it is read?")
        if kind in NEEDS_STEP and not step:
            wrong.append(f"{name}: what does a step of the clock do?")
    assert wrong == []
    assert {rule["kind"] for rule in TABLE["rules"]} < KINDS
    assert all(rule["why"] for rule in TABLE["rules"])


def test_every_rule_covers_something() -> None:
    found = attributes()
    unused = [rule.name.pattern for rule in RULES if not any(map(rule.covers, found))]
    assert unused == []


def test_attributes_are_found_however_they_are_declared() -> None:
    source = """
class Lease(NamedTuple):
    ends_at: float
    name: str
    began: datetime | None = None

    def renew(self) -> None:
        self._until, self.count = 1.0, 2
        self.waiting: timedelta = now()
        local_at = 3.0
        other.seen_at = 4.0
"""
    names = {each.name for each in attributes_of("m", nodes_of(source))}
    assert names == {f"m.Lease.{name}" for name in ("ends_at", "began", "_until", "waiting")}
