"""`outbox journal`, and `outbox endpoint history`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Command

pytestmark = pytest.mark.one_major

URL = "https://shop.example/hooks"


def test_entries_are_filtered_and_paged(here: Command) -> None:
    for name in ("shop", "mail"):
        here("endpoint", "add", name, URL)
    here("endpoint", "pause", "shop", "--comment", "their maintenance")
    entries = here("journal", "--json").json
    assert [(e["kind"], e["endpoint"]) for e in entries] == [
        ("endpoint_paused", "shop"),
        ("endpoint_added", "mail"),
        ("endpoint_added", "shop"),
    ]
    assert entries[0]["data"]["comment"] == "their maintenance"
    (entry,) = here("journal", "--kind", "endpoint pau", "--json").json
    assert entry == entries[0]
    assert here("journal", "--endpoint", "mail", "--json").json == [entries[1]]
    first = here("journal", "--limit", "2", "--json")
    assert first.json == entries[:2]
    assert f"next page: --after {entries[1]['id']}" in first.err
    assert here("journal", "--after", str(entries[1]["id"]), "--json").json == entries[2:]
    me = entries[0]["actor"]
    assert here("journal", "--actor", me[1:].upper(), "--json").json == entries
    text = here("journal", "--actor", "nobody-else", "--endpoint", "shop")
    assert text.out == "no entries\n"
    assert "endpoint paused" in here("journal").out
    assert 'there is no endpoint "shopp"' in here("journal", "--endpoint", "shopp").err


def test_the_history_of_an_endpoint_is_shown(here: Command) -> None:
    here("endpoint", "add", "shop", URL)
    text = here("endpoint", "history", "shop")
    assert text.out == "nothing was sent in the last 24 hours\n"
    found = here("endpoint", "history", "shop", "--minutes", "5", "--json").json
    assert found == {"interval_s": 300, "items": []}
    assert 'did you mean "shop"' in here("endpoint", "history", "shup").err
