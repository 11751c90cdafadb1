"""`outbox quota`, and the commands that it limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commands import Command

pytestmark = pytest.mark.one_major

URL = "https://example.com/"
ACME = ("--tenant", "acme")


def test_quotas_are_shown_set_and_unset(here: Command) -> None:
    assert here("quota", "set", "acme", "--endpoints", 2, "--once-keys", 5).code == 0
    listed = here("quota", "list", "--json").json
    assert [row["tenant"] for row in listed] == [None, "acme"]
    assert (listed[1]["endpoints"], listed[1]["lanes"]) == (2, None)
    here("endpoint", "add", "shop", URL, *ACME, "--lanes", 4)
    shown = here("quota", "show", "acme").out
    assert "1 of 2" in shown
    assert "4 of 1,024" in shown
    assert here("quota", "unset", "acme", "--json").json["endpoints"] == {"used": 1, "max": 100}
    for wrong in (("set", "acme"), ("set", "--lanes", 1), ("set", "acme", "--all-tenants")):
        assert here("quota", *wrong).code == 2


def test_no_command_passes_a_quota(here: Command, tmp_path: Path) -> None:
    here("endpoint", "add", "shop", URL, *ACME, "--lanes", 4)
    here("endpoint", "add", "other", URL)
    here("quota", "set", "acme", "--endpoints", 1, "--lanes", 4, "--schedules", 0)
    file = tmp_path / "endpoints.yaml"
    file.write_text(f"endpoints: [{{name: more, url: {URL}, tenant: acme}}]")
    for command, resource in (
        (("endpoint", "add", "more", URL, *ACME), "endpoints"),
        (("endpoint", "update", "other", *ACME), "endpoints"),
        (("endpoint", "update", "shop", "--lanes", 5), "lanes"),
        (("apply", "-f", file), "endpoints"),
        (("schedule", "add", "nightly", "@daily", "--type", "a.b", *ACME), "schedules"),
    ):
        refused = here(*command)
        assert refused.code == 2, command
        assert f" {resource} and would have " in refused.error
        assert refused.error.endswith("or let an operator raise the quota: outbox quota set")
