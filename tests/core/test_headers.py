from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.model import headers
from outbox.core.model.headers import (
    WIRE_BYTES_MAX,
    WIRE_COUNT_MAX,
    EndpointHeaders,
    event_header_problem,
    header_problem,
    valid_headers,
)
from outbox.core.model.headers import merge as merge_json

if TYPE_CHECKING:
    from outbox.core.model.response import Headers


def merge(endpoint: dict[str, Any], event: dict[str, Any]) -> Headers:
    return merge_json(valid_headers(endpoint), orjson.dumps(event))


def test_endpoint_headers_come_first_and_cannot_be_changed_by_events() -> None:
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
def test_relay_headers_cannot_be_overridden(name: str) -> None:
    assert header_problem(name, "1") is not None
    assert merge({name: "1"}, {name: "2"}) == ()


@pytest.mark.parametrize("name", ["Acme-Lane", "acme_sequence", "ACME-Attempt"])
def test_headers_with_the_prefix_of_the_endpoint_cannot_be_overridden(name: str) -> None:
    assert valid_headers({name: "1"}, "Acme-").own == ()
    assert merge_json(EndpointHeaders(prefix="Acme-"), orjson.dumps({name: "2"})) == ()


@pytest.mark.parametrize(
    "name",
    ["Authorization", "cookie", "Forwarded", "X_Forwarded_For", "True-Client-IP",
     "X-Forwarded-For", "x-forwarded-host", "X-Real-IP", "X-HTTP-Method-Override",
     "X-Original-URL"],
)  # fmt: skip
def test_an_event_cannot_set_client_identity_headers(name: str) -> None:
    """Receivers or proxies of other endpoints would trust such a header."""
    assert event_header_problem(name, "1") is not None
    assert merge({}, {name: "1"}) == ()
    assert merge({name: "1"}, {name.lower(): "2"}) == ((name, "1"),)


def test_names_that_a_receiver_may_confuse_are_equal() -> None:
    """CGI and WSGI map both names to the same variable."""
    assert merge({"X-Env-Name": "own"}, {"X_Env_Name": "other"}) == (("X-Env-Name", "own"),)
    assert merge({"X_Env": "1", "x-env": "2"}, {}) == (("X_Env", "1"),)


def test_a_header_invalid_in_http_is_dropped_and_the_other_one_stays() -> None:
    assert merge({"X-A": "fine"}, {"X-A": "bad\r\nX-B: 1"}) == (("X-A", "fine"),)
    assert merge({"X A": "1", "X-N": 1, "": "1"}, {}) == ()
    assert merge({}, {"X-A": " spaced\t"}) == (("X-A", "spaced"),)
    assert merge({"X-A": "1", "x-a": "2"}, {}) == (("X-A", "1"),)


def test_all_headers_share_a_limit_and_endpoint_headers_stay() -> None:
    endpoint = {"Authorization": "Bearer a", "X-Own": "o" * 8000}
    event = {"X-Large": "x" * 5000, "X-Small": "s", "X-Long": "l" * 5000}
    merged = merge(endpoint, event)
    assert merged == (*endpoint.items(), ("X-Small", "s"))
    assert sum(len(f"{name}: {value}\r\n") for name, value in merged) <= WIRE_BYTES_MAX
    many = {f"X-{n}": "1" for n in range(100)}
    assert len(merge(endpoint, many)) == WIRE_COUNT_MAX
    assert merge(endpoint, many)[:2] == tuple(endpoint.items())


def test_only_as_many_headers_as_an_event_may_have_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plain INSERT writes up to 8 KiB of them, for which each delivery took milliseconds."""
    checked: list[str] = []

    def problem(name: str, _: object) -> str:
        checked.append(name)
        return "is counted"

    monkeypatch.setattr(headers, "event_header_problem", problem)
    assert merge({}, {f"n{n}": "" for n in range(900)}) == ()
    assert len(checked) == WIRE_COUNT_MAX


def test_the_operator_of_an_endpoint_may_set_what_a_publisher_may_not() -> None:
    """Such as a token of its receiver; not what the relay sets itself."""
    for name in ("X-Outbox-Token", "Status", "Outbox-Key"):
        assert header_problem(name, "1") is None, name
        assert event_header_problem(name, "1") is not None, name
    for name in (
        "outbox-control",
        "Outbox_Control",
        "body",
        "webhook-id",
        "ce-id",
        "X-Lane",
    ):
        assert header_problem(name, "1") is not None, name
