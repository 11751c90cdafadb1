"""`outbox journal`: entries with their actor, filtered and paged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox.operations import journal
from tests.cli.test_commands import execute

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


def test_entries_are_listed_filtered_and_paged(here: Command) -> None:
    here("endpoint", "add", "shop", "https://receiver.test/")
    here("endpoint", "pause", "shop", "--comment", "maintenance")
    here("endpoint", "add", "other", "https://receiver.test/")

    def kinds(*arguments: object) -> list[str]:
        return [row["kind"] for row in here("journal", "--json", *arguments).json]

    assert kinds("--limit", 3) == ["endpoint_added", "endpoint_paused", "endpoint_added"]
    assert kinds("--endpoint", "shop") == ["endpoint_paused", "endpoint_added"]
    assert kinds("--kind", "endpoint_paused", "--since", "1h") == ["endpoint_paused"]
    assert kinds("--actor", "another", "--until", "1h") == []
    newest = here("journal", "--json", "--limit", 1).json[0]["id"]
    assert kinds("--limit", 1, "--after", newest) == ["endpoint_paused"]
    line = here("journal", "--kind", "endpoint_paused").out.splitlines()[1]
    assert "comment maintenance" in line
    assert here("journal", "--kind", "none").out == "no journal entries\n"
    assert "kind is empty" in here("journal", "--kind", "").err


def test_entries_of_relays_are_left_out(
    here: Command, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    here("endpoint", "add", "shop", "https://receiver.test/")
    execute(
        database,
        """INSERT INTO journal (kind, actor)
           SELECT 'sequencing_stopped', 'replica 7' FROM generate_series(1, 6) RETURNING id""",
    )
    by = {each: here("journal", "--by", each, "--json").json for each in ("people", "relays")}
    assert [row["kind"] for row in by["people"]] == ["endpoint_added"]
    assert [row["kind"] for row in by["relays"]] == ["sequencing_stopped"] * 6
    assert len(here("journal", "--json").json) == 7
    monkeypatch.setattr(journal, "SCANNED_MAX", 6)
    page = here("journal", "--by", "people")
    assert page.out == "none among those that were searched\n"
    oldest = by["relays"][-1]["id"]
    assert page.err == f"older rows were not searched; next page: --after {oldest}\n"
    assert "shop" in here("journal", "--by", "people", "--after", oldest).out
