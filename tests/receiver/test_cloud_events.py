"""The CloudEvents libraries of PyPI and npm read what a relay sends."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

import orjson
import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from cloudevents.core.formats.json import JSONFormat

from outbox.core.messages.batch import prepare_batch
from outbox.core.messages.message import prepare
from outbox.core.messages.signed_metadata import decode_text
from outbox.core.model.delivery import Delivery
from outbox.core.model.headers import parse_lines
from outbox.core.model.message_format import MessageFormat
from outbox.errors import CannotRun
from tests.support.npm import NodeScript
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.messages.message import Prepared

pytestmark = pytest.mark.system

VERSION = "10.0.0"
SOURCE = "https://shop.example/orders?x=%20"
KEYS = (
    None,
    "order-7",
    'a "quoted" key',
    "50 %",
    " ",
    "é \u2028 \U0001f600",
    "tab\tand\nline",
    "\x7f",
    "k" * 512,
)
BYTES = "application/x-protobuf"
PAYLOADS = (
    b"null",
    b"[]",
    b'" "',
    b"7",
    b'{"n": 1.50, "\xc3\xa9": "\xe2\x82\xac"}',
    b'"text"',
    b"\0\xff",
)


_TEXTS = {"source", "subject", "encodedkey"}
"""Attributes with characters that are percent-encoded in headers."""


class Peer(Protocol):
    """Another implementation of CloudEvents."""

    def read(self, requests: Sequence[Prepared]) -> list[list[dict[str, Any]]]:
        """The attributes and the data of the events of each request."""
        ...


def headers_of(request: Prepared) -> dict[str, str]:
    return {name.lower(): value for name, value in parse_lines(request.lines)}


class Pypi:
    """The PyPI package, which has no batches: their elements are read one by one."""

    def read(self, requests: Sequence[Prepared]) -> list[list[dict[str, Any]]]:
        return [self._events(each) for each in requests]

    def _events(self, request: Prepared) -> list[dict[str, Any]]:
        headers = headers_of(request)
        if headers["content-type"].startswith("application/cloudevents-batch"):
            elements = orjson.loads(request.body)
            events = [JSONFormat().read(None, orjson.dumps(each)) for each in elements]
        else:
            events = [from_http_event(HTTPMessage(headers, request.body))]
        return [each.get_attributes() | {"data": each.get_data()} for each in events]


class Npm:
    """The npm package, in Node.  It does not decode the values of headers, as it should."""

    def __init__(self) -> None:
        self._script = NodeScript("cloudevents", VERSION, "cloudevents.cjs")

    def read(self, requests: Sequence[Prepared]) -> list[list[dict[str, Any]]]:
        given = [
            {"headers": headers_of(each), "body": base64.b64encode(each.body).decode()}
            for each in requests
        ]
        found: list[list[dict[str, Any]]] = self._script.run(given)
        for request, (event, *_) in zip(requests, found, strict=True):
            if "ce-id" in headers_of(request):
                event.update((name, decode_text(event[name])) for name in _TEXTS & event.keys())
        for event in (each for events in found for each in events):
            if "data_base64" in event:
                event["data"] = base64.b64decode(event["data_base64"])
        return found


@pytest.fixture(scope="session", params=sampled([Pypi, Npm]), ids=["pypi", "npm"])
def peer(request: pytest.FixtureRequest) -> Peer:
    try:
        made: Peer = request.param()
    except CannotRun as error:
        pytest.skip(str(error))
    return made


def deliveries() -> list[Delivery]:
    return [
        Delivery(
            endpoint_id=UUID(int=7),
            lane="0d0a2ee48d4a-1-0",
            seq=n,
            batch=1,
            outbox_id=n,
            event_id=UUID(int=n),
            type="order.paid",
            tenant=None if n % 2 else "acme",
            key=key,
            published_at=1_769_860_800.0 + n % 10**6 / 1e6,
            expires_at=None,
            payload=payload,
            content_type=BYTES if payload.startswith(b"\0") else None,
            headers=b'{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}',
        )
        for n, (key, payload) in enumerate(
            ((key, payload) for key in KEYS for payload in PAYLOADS), 2**31
        )
    ]


def check(delivery: Delivery, event: dict[str, Any]) -> None:
    """The event is the delivery; libraries may show a time or an absent value differently."""
    assert event["id"] == delivery.message_id
    assert (event["type"], event["source"]) == ("order.paid", SOURCE)
    assert (event["lane"], event["lanesequence"]) == (delivery.lane, str(delivery.seq))
    assert event["previoussequence"] == str(delivery.seq - 1)
    assert event["eventid"] == str(delivery.event_id)
    assert event.get("tenant") == delivery.tenant
    key = event.get("subject")
    if key is None and "encodedkey" in event:
        key = decode_text(event["encodedkey"])
    assert key == delivery.key
    assert event["traceparent"].startswith("00-0af7651916cd43dd")
    if delivery.content_type is not None:
        assert event["datacontenttype"] == delivery.content_type
        assert event["data"] == delivery.payload
        return
    # npm's library leaves JSON that is neither an object nor an array as text.
    assert event.get("data") in (orjson.loads(delivery.payload), delivery.payload.decode())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cloudevents", "cloudevents-binary"])
def test_another_library_reads_single_events(peer: Peer, name: Any) -> None:
    sent = deliveries()
    message_format = MessageFormat(name, SOURCE)
    requests = [prepare(each, each.seq - 1, message_format=message_format) for each in sent]
    for delivery, (event,) in zip(sent, peer.read(requests), strict=True):
        check(delivery, event)


@pytest.mark.slow
def test_another_library_reads_a_batch(peer: Peer) -> None:
    sent = deliveries()
    message_format = MessageFormat("cloudevents", SOURCE)
    (events,) = peer.read([prepare_batch(sent, sent[0].seq - 1, message_format=message_format)])
    for delivery, event in zip(sent, events, strict=True):
        check(delivery, event)
