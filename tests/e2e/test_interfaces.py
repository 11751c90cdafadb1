"""What semantic versions cover: nothing that the last release offers is gone or asks for more."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import interfaces
from tests.support.checkout import ROOT, export, last_release, require_checkout
from tests.support.process import outbox as command

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.full]

FUNCTIONS = """
SELECT proname AS name, coalesce(proargnames[1:pronargs], '{}') AS arguments,
       pronargs - pronargdefaults AS required
  FROM pg_proc WHERE pronamespace = 'relay'::regnamespace
"""
COLUMNS = """
SELECT attname AS name, attnotnull AND NOT atthasdef AND attidentity = '' AS is_required
  FROM pg_attribute WHERE attrelid = 'relay.outbox'::regclass AND attnum > 0 AND NOT attisdropped
"""


@dataclass(frozen=True)
class Interfaces:
    """What a version offers, and what it requires of a caller."""

    offered: frozenset[str]
    required: frozenset[str]


def incompatible(before: Interfaces, after: Interfaces) -> set[str]:
    """What breaks a caller of the version before."""
    return {f"gone: {name}" for name in before.offered - after.offered} | {
        f"required now: {name}"
        for name in after.required - before.required
        if _owner(name) in before.offered
    }


def _owner(name: str) -> str:
    """The route or the command that a parameter belongs to."""
    words = name.split(" ")
    return " ".join(words[:2] if words[0].isupper() else words[:-1])


def _interfaces(package: Path) -> Interfaces:
    path = os.pathsep.join(map(str, (package, *package.glob("packages/*"))))
    done = subprocess.run(
        [sys.executable, "-P", interfaces.__file__],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True, check=True, text=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    return Interfaces(frozenset(found["offered"]), frozenset(found["required"]))


@pytest.fixture(scope="session")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the program and the schema of the last release."""
    require_checkout()
    tag = last_release()
    if tag is None:
        pytest.skip("there is no release in the history")
    directory = tmp_path_factory.mktemp("last-release")
    export(tag, directory, "docs", "outbox", "packages", "schema")
    return directory


def test_a_removed_name_and_a_new_requirement_are_incompatible() -> None:
    now = _interfaces(ROOT)
    assert {"outbox dead skip --lane", "OUTBOX_DSN", "outbox.publish"} <= now.offered
    assert {"POST /v1/events body.events.payload", "GET /v1/live 200.totals.at"} <= now.offered
    assert {"outbox dead skip --lane", "POST /v1/endpoints/{name}/skip body.lane"} <= now.required
    assert incompatible(now, now) == set()
    without = Interfaces(now.offered - {"outbox.publish"}, now.required)
    assert incompatible(now, without) == {"gone: outbox.publish"}
    assert incompatible(without, now) == set()
    more = {"POST /v1/events body.new", "POST /v1/new body.x", "outbox status --new"}
    assert incompatible(now, Interfaces(now.offered, now.required | more)) == {
        "required now: POST /v1/events body.new",
        "required now: outbox status --new",
    }


def test_the_interfaces_of_the_last_release_are_still_there(last: Path) -> None:
    assert incompatible(_interfaces(last), _interfaces(ROOT)) == set()


async def test_producers_of_the_last_release_can_use_the_newest_schema(
    empty_database: Database, last: Path
) -> None:
    documented = (last / "docs/reference/sql.md").read_text()
    names = re.findall(r"^### (\w+)$", documented.partition("\n## Administer")[0], re.MULTILINE)
    found = []
    for package in (last, None):
        env = {"OUTBOX_DSN": empty_database.dsn}
        assert (await command("migrate", env=env, package=package)).code == 0
        async with empty_database.connection() as connection:
            functions = {row["name"]: row for row in await connection.fetch(FUNCTIONS)}
            columns = {row["name"]: row for row in await connection.fetch(COLUMNS)}
            found.append((functions, columns))
    (functions, columns), (functions_now, columns_now) = found
    assert "publish" in names
    for name in names:
        assert _accepts_the_same(functions[name], functions_now[name]), name
    assert set(columns) <= set(columns_now)
    required = {name for name in columns_now if columns_now[name]["is_required"]}
    assert required == {name for name in columns if columns[name]["is_required"]}


def _accepts_the_same(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a function can be called as before, by position and by name."""
    known = before["arguments"]
    return after["arguments"][: len(known)] == known and after["required"] <= before["required"]
