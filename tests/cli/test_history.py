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
    found = here("endpoint", "history", "shop", "--minutes", "5", "--json").json
    assert found == {"interval_s": 300, "items": []}
    assert 'did you mean "shop"' in here("endpoint", "history", "shup").err
