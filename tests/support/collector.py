"""An OTLP collector: accepts pushes over HTTP and keeps them."""

from __future__ import annotations

import gzip
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from outbox.web.address import Address
from outbox.web.serving import listen, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Span:
    """A span as pushed."""

    def __init__(self, span: Any, resource: Any) -> None:
        self.name: str = span.name
        self.trace_id: str = span.trace_id.hex()
        self.id: str = span.span_id.hex()
        self.parent: str = span.parent_span_id.hex()
        self.kind: int = span.kind
        self.failed: bool = span.status.code == 2
        self.start_s: float = span.start_time_unix_nano / 1e9
        self.end_s: float = span.end_time_unix_nano / 1e9
        self.attributes = _attributes(span.attributes)
        self.service = _attributes(resource.attributes)["service.name"]


class Collector:
    """The received traces and metrics."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.metrics: dict[str, Any] = {}
        """The newest measurement of each name."""
        self.raw = b""
        """All requests, as received."""
        self.url = ""

    async def traces(self, request: web.Request) -> web.Response:
        body = await _body(request)
        self.raw += body
        output = ExportTraceServiceRequest.FromString(body)
        self.spans += [
            Span(span, each.resource)
            for each in output.resource_spans
            for scope in each.scope_spans
            for span in scope.spans
        ]
        return web.Response()

    async def measurements(self, request: web.Request) -> web.Response:
        body = await _body(request)
        self.raw += body
        output = ExportMetricsServiceRequest.FromString(body)
        for each in output.resource_metrics:
            for scope in each.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope.metrics}
        return web.Response()


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A listening collector."""
    collector = Collector()
    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/v1/traces", collector.traces)
    application.router.add_post("/v1/metrics", collector.measurements)
    async with serving(application, await listen(Address("127.0.0.1", 0))) as address:
        collector.url = address.url.rstrip("/")
        yield collector


async def _body(request: web.Request) -> bytes:
    body = await request.read()
    return gzip.decompress(body) if request.headers.get("Content-Encoding") == "gzip" else body


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
