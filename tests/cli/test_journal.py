"""`outbox journal`: entries with their actor, filtered and paged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.commands import Command

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
