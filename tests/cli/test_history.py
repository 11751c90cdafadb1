"""`outbox endpoint history`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.commands import Command

pytestmark = pytest.mark.one_major

URL = "https://shop.example/hooks"


def test_the_history_of_an_endpoint_is_shown(here: Command) -> None:
    here("endpoint", "add", "shop", URL)
    text = here("endpoint", "history", "shop")
    assert text.out == "nothing was sent in the last 24 hours\n"
    asked = ("endpoint", "history", "shop", "--hours", "6", "--minutes", "5", "--json")
    nothing = {"successes": 0, "failures": 0, "p50_ms": None, "p99_ms": None}
    assert here(*asked).json == {**nothing, "hours": 6, "interval_s": 300, "items": []}
    assert 'did you mean "shop"' in here("endpoint", "history", "shup").err
