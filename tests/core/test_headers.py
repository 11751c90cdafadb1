from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.model.headers import (
    WIRE_BYTES_MAX,
    WIRE_COUNT_MAX,
    event_header_problem,
    header_problem,
    own,
)
from outbox.core.model.headers import merge as merge_json

if TYPE_CHECKING:
    from outbox.core.model.response import Headers


def merge(endpoint: dict[str, Any], event: dict[str, Any]) -> Headers:
    return merge_json(own(endpoint), orjson.dumps(event))


def test_the_endpoints_headers_come_first_and_are_not_for_events_to_change() -> None:
    endpoint = {"Authorization": "Bearer a", "X-Env": "prod"}
    event = {"x-env": "test", "traceparent": "00-1"}
    assert merge(endpoint, event) == (
        ("Authorization", "Bearer a"),
        ("X-Env", "prod"),
        ("traceparent", "00-1"),
    )
    assert merge(endpoint, {}) == tuple(endpoint.items())
    assert merge({}, event) == tuple(event.items())


@pytest.mark.parametrize(
    "name",
    [
        "X-Lane",
        "x-sequence",
        "X_Sequence",
        "Webhook_Signature",
        "Webhook-Id",
        "webhook-anything",
        "Host",
        "Content-Length",
        "TE",
    ],
)
def test_ours_cannot_be_overridden_by_either(name: str) -> None:
    assert header_problem(name, "1") is not None
    assert merge({name: "1"}, {name: "2"}) == ()


@pytest.mark.parametrize(
    "name",
    ["Authorization", "cookie", "Forwarded", "X_Forwarded_For", "True-Client-IP",
     "X-Forwarded-For", "x-forwarded-host", "X-Real-IP", "X-HTTP-Method-Override",
     "X-Original-URL"],
)  # fmt: skip
def test_an_event_does_not_say_who_asks(name: str) -> None:
    """It goes to endpoints of others, whose receivers or proxies would believe it."""
    assert event_header_problem(name, "1") is not None
    assert merge({}, {name: "1"}) == ()
    assert merge({name: "1"}, {name.lower(): "2"}) == ((name, "1"),)


def test_names_that_a_receiver_may_take_for_one_are_one() -> None:
    """CGI and WSGI make the same variable of both."""
    assert merge({"X-Env-Name": "own"}, {"X_Env_Name": "other"}) == (("X-Env-Name", "own"),)
    assert merge({"X_Env": "1", "x-env": "2"}, {}) == (("X_Env", "1"),)


def test_what_http_cannot_carry_is_left_out_and_the_other_one_stays() -> None:
    assert merge({"X-A": "fine"}, {"X-A": "bad\r\nX-B: 1"}) == (("X-A", "fine"),)
    assert merge({"X A": "1", "X-N": 1, "": "1"}, {}) == ()
    assert merge({}, {"X-A": " spaced\t"}) == (("X-A", "spaced"),)
    assert merge({"X-A": "1", "x-a": "2"}, {}) == (("X-A", "1"),)


def test_both_together_have_a_bound_and_the_endpoints_stay() -> None:
    endpoint = {"Authorization": "Bearer a", "X-Own": "o" * 8000}
    event = {"X-Large": "x" * 5000, "X-Small": "s", "X-Long": "l" * 5000}
    merged = merge(endpoint, event)
    assert merged == (*endpoint.items(), ("X-Small", "s"))
    assert sum(len(f"{name}: {value}\r\n") for name, value in merged) <= WIRE_BYTES_MAX
    many = {f"X-{n}": "1" for n in range(100)}
    assert len(merge(endpoint, many)) == WIRE_COUNT_MAX
    assert merge(endpoint, many)[:2] == tuple(endpoint.items())
