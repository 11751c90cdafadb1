"""The API's errors name routes and fields, not commands and options."""

from __future__ import annotations

import pytest

from outbox.errors import Conflict, NotFound, UsageError
from outbox_api.problem import _ROUTES, in_api_words, problem_for
from outbox_api.routes import ROUTES


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        (
            'there is no endpoint "shop"; see: outbox endpoint list',
            'there is no endpoint "shop"; see: GET /v1/endpoints',
        ),
        (
            "dead letter 3 was discarded; see: outbox dead show 3",
            "dead letter 3 was discarded; see: GET /v1/dead-letters/3",
        ),
        (
            "is blocked by dead letter 7; first: outbox dead replay 7, or outbox dead discard 7",
            "is blocked by dead letter 7; first: POST /v1/dead-letters/replay, or POST "
            "/v1/dead-letters/discard",
        ),
        (
            "url: 10.0.0.1 is private; open it with --allow-network or OUTBOX_ALLOW_NETWORKS",
            "url: 10.0.0.1 is private; open it with allow_networks or OUTBOX_ALLOW_NETWORKS",
        ),
        ("an outbox list of a--b", "an outbox list of a--b"),
    ],
)
def test_commands_and_options_become_routes_and_fields(text: str, detail: str) -> None:
    assert in_api_words(text) == detail
    for kind in (NotFound, Conflict, UsageError):
        problem = problem_for(kind(text))
        assert problem is not None
        assert problem.detail == detail


def test_every_route_that_an_error_names_exists() -> None:
    paths = {f"{route.method} {route.path}" for route in ROUTES}
    assert set(_ROUTES.values()) <= paths
