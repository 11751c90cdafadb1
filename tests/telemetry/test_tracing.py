"""Spans: which events are traced, and how the spans of a delivery are related."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outbox.core.delivery.commands import AttemptRow
from outbox.core.model.response import AttemptResult
from outbox.telemetry.sampling import Sampling, trace_id
from outbox.telemetry.tracing import PresetIdGenerator, Tracing
from tests.core.test_message import DELIVERY

if TYPE_CHECKING:
    import random

    from outbox.core.model.delivery import Delivery

PLAIN = DELIVERY._replace(headers=None)
PRODUCER = "0af7651916cd43dd8448eb211c80319c"


REQUIRED = ("http.request.method", "server.address", "server.port", "url.full")


class Traced:
    """Tracing with spans that the test can inspect."""

    def __init__(self, rate: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        ids, chosen = PresetIdGenerator(), Sampling(rate, follows_producer=True)
        provider = TracerProvider(chosen.sampler, id_generator=ids)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider, ids, chosen)

    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def attempt(
        self, delivery: Delivery, number: int = 1, url: str = "https://shop.example/hooks"
    ) -> str | None:
        """Trace one attempt and return its traceparent."""
        origin = self.tracing.origin(delivery)
        if origin is None:
            return None
        span = self.tracing.start_attempt("shop", url, delivery, number, 10.0, origin)
        row = AttemptRow(1, 1, number, "delivered", 200, None, 10.0, 0.5)
        self.tracing.end_attempt(span, row, AttemptResult.completed(200, 0.5))
        return dict(span.headers)["traceparent"]

    def ended(self, delivery: Delivery) -> None:
        origin = self.tracing.origin(delivery)
        if origin is not None:
            self.tracing.record_delivery("shop", delivery, "delivered", 1, 9.0, 10.5, origin)


def test_attempts_by_different_replicas_belong_to_one_delivery() -> None:
    one, other = Traced(), Traced()
    first, second = one.attempt(DELIVERY), other.attempt(DELIVERY, 2)
    other.ended(DELIVERY)
    assert first is not None
    assert second is not None
    assert first.split("-")[1] == second.split("-")[1] == PRODUCER
    assert first != second
    attempts, (delivery,) = [*one.spans(), other.spans()[0]], other.spans()[1:]
    assert {each.parent.span_id for each in attempts if each.parent} == {delivery.context.span_id}
    assert delivery.parent is not None
    assert f"{delivery.parent.span_id:016x}" == "b7ad6b7169203331"
    assert (delivery.start_time, delivery.end_time) == (9 * 10**9, 10_500_000_000)


def test_deliveries_of_an_event_without_a_trace_share_one_trace() -> None:
    traced = Traced()
    others = [PLAIN._replace(seq=n, lane=f"lane-{n}") for n in (1, 2)]
    for each in others:
        traced.attempt(each)
        traced.ended(each)
    assert len({span.context.trace_id for span in traced.spans()}) == 1
    assert len({span.context.span_id for span in traced.spans()}) == 4
    deliveries = [span for span in traced.spans() if span.parent is None]
    assert [span.name for span in deliveries] == ["deliver shop", "deliver shop"]


def test_an_event_that_the_producer_did_not_sample_is_not_traced() -> None:
    traced = Traced()
    unsampled = DELIVERY.headers.replace(b"-01", b"-00") if DELIVERY.headers else None
    assert traced.attempt(DELIVERY._replace(headers=unsampled)) is None
    traced.ended(DELIVERY._replace(headers=unsampled))
    assert traced.spans() == []


def test_an_event_that_the_producer_sampled_is_traced_at_ratio_zero() -> None:
    traced = Traced(0.0)
    assert traced.attempt(DELIVERY) is not None
    assert traced.attempt(PLAIN) is None


def test_a_ratio_of_a_tenth_samples_a_tenth(rng: random.Random) -> None:
    """An event id is only partly random, and a sampler uses its other bits, too."""
    traced = Traced(0.1)
    sampled = 0
    for _ in range(2000):
        event_id = UUID(int=rng.getrandbits(128), version=4)
        delivery = PLAIN._replace(event_id=event_id)
        sampled += traced.attempt(delivery) is not None
        traced.ended(delivery)
    assert 130 <= sampled <= 280
    assert len(traced.spans()) == 2 * sampled, "a delivery is traced as a whole or not at all"


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACEPARENT"])
def test_the_traceparent_header_is_case_insensitive(name: str) -> None:
    assert DELIVERY.headers is not None
    headers = DELIVERY.headers.replace(b"traceparent", name.encode())
    traceparent = Traced().attempt(DELIVERY._replace(headers=headers))
    assert traceparent is not None
    assert PRODUCER in traceparent


@pytest.mark.parametrize("value", ["", "nonsense", "00-0-0-01", f"00-{'0' * 32}-{'0' * 16}-01"])
def test_an_invalid_traceparent_is_ignored(value: str) -> None:
    headers = b'{"traceparent": "%b"}' % value.encode()
    assert trace_id(DELIVERY._replace(headers=headers)) == trace_id(PLAIN)


@pytest.mark.parametrize(
    ("url", "host", "port", "shown"),
    [
        ("https://a.example/hooks", "a.example", 443, "https://a.example/hooks"),
        ("http://a.example:8080/", "a.example", 8080, "http://a.example:8080/"),
        ("https://[2001:db8::1]/x", "2001:db8::1", 443, "https://[2001:db8::1]/x"),
        ("https://a.example/x?token=s3cret", "a.example", 443, "https://a.example/x?REDACTED"),
    ],
)
def test_a_span_says_where_its_request_went(url: str, host: str, port: int, shown: str) -> None:
    """The attributes that OpenTelemetry requires of an HTTP client's span, without a secret."""
    traced = Traced()
    traced.attempt(PLAIN, url=url)
    (span,) = traced.spans()
    assert span.attributes is not None
    assert {name: span.attributes[name] for name in REQUIRED} == {
        "http.request.method": "POST",
        "server.address": host,
        "server.port": port,
        "url.full": shown,
    }
    assert "s3cret" not in span.to_json()
