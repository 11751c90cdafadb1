"""Names that are parts of paths: none is new, and one of an earlier version can be changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
import pytest

from tests.cli.test_commands import URL, execute

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


@pytest.mark.parametrize("name", [".", ".."])
def test_no_command_takes_a_name_that_no_url_could_have(
    here: Command, tmp_path: Path, name: str
) -> None:
    assert here("endpoint", "add", "a", URL).code == 0
    file = tmp_path / "endpoints.json"
    file.write_bytes(orjson.dumps({"endpoints": [{"name": name, "url": URL}]}))
    schedule = ("schedule", "add", "nightly", "@daily", "--type", "a.b")
    for words in (
        ("endpoint", "add", name, URL),
        ("endpoint", "add", "b", URL, "--tenant", name),
        ("endpoint", "update", "a", "--name", name),
        ("endpoint", "update", "a", "--tenant", name),
        ("apply", "-f", file),
        ("schedule", "add", name, *schedule[3:]),
        (*schedule, "--tenant", name),
        ("token", "add", name, "--scope", "read"),
        ("token", "add", "a", "--scope", "read", "--tenant", name),
        ("quota", "set", name, "--endpoints", "1"),
        ("publish", "a.b", "--tenant", name),
    ):
        refused = here(*words)
        assert refused.code == 2, words
        assert '"." and ".." are parts of paths, so no URL could name it' in refused.error, words


@pytest.mark.full
def test_a_name_of_an_earlier_version_can_be_changed_and_removed(
    here: Command, database: Database
) -> None:
    for old in ("..", "a\u202eb"):
        assert here("endpoint", "add", "a", URL).code == 0
        execute(database, f"UPDATE endpoint SET name = '{old}' RETURNING 1")
        for words in (("show", old), ("list",), ("pause", old), ("resume", old), ("export",)):
            assert here("endpoint", *words).code == 0, words
        assert here("endpoint", "update", old, "--lanes", "2").code == 2
        assert here("endpoint", "update", old, "--name", "b").code == 0
        execute(database, f"UPDATE endpoint SET name = '{old}' RETURNING 1")
        assert here("endpoint", "remove", old).code == 0
    execute(database, "INSERT INTO quota (tenant, endpoints) VALUES ('..', 1) RETURNING 1")
    assert here("quota", "show", "..").code == 0
    assert here("quota", "unset", "..").code == 0
    assert here("schedule", "add", "n", "@daily", "--type", "a.b").code == 0
    execute(database, "UPDATE schedule SET name = '..' RETURNING 1")
    for words in (("show", ".."), ("pause", ".."), ("resume", ".."), ("remove", "..")):
        assert here("schedule", *words).code == 0, words
