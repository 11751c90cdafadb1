"""A real relay process, observed from outside: probes, Prometheus, OTLP, systemd."""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from prometheus_client.parser import text_string_to_metric_families

import outbox
from outbox.web.address import Address
from outbox.web.serving import listen, serving
from tests.support.collector import collecting
from tests.support.ports import free_port
from tests.support.process import relay_process
from tests.support.relay import add_endpoint, all_ended, fetchval, publish
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from tests.support.collector import Collector, Span
    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.full]


def tracer_of(service: str, collector: Collector) -> TracerProvider:
    provider = TracerProvider(resource=Resource({"service.name": service}))
    exporter = OTLPSpanExporter(f"{collector.url}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=20))
    return provider


@asynccontextmanager
async def traced_receiver(collector: Collector, fail_first: int) -> AsyncIterator[str]:
    """A receiver with its own OpenTelemetry, which rejects the first requests."""
    provider = tracer_of("receiver", collector)
    requests = 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        span = provider.get_tracer("receiver").start_span(
            "POST /hooks", extract(request.headers), SpanKind.SERVER
        )
        span.end()
        return web.Response(status=503 if requests <= fail_first else 204)

    application = web.Application()
    application.router.add_post("/hooks", handle)
    async with serving(application, await listen(Address("127.0.0.1", 0))) as address:
        yield f"{address.url}hooks"
    await asyncio.to_thread(provider.shutdown)


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def status_or_none(url: str) -> tuple[int, str] | None:
    """Like `get`; None if no server listens."""
    try:
        return await get(url)
    except aiohttp.ClientConnectionError:
        return None


def health(port: int) -> Mapping[str, str]:
    return {"OUTBOX_HEALTH": f"127.0.0.1:{port}"}


async def test_one_trace_joins_producer_relay_and_receiver(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting() as collector, traced_receiver(collector, fail_first=1) as url:
        await add_endpoint(database, "billing", url=url)
        env = {
            "OUTBOX_DSN": database.dsn,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
        }
        provider = tracer_of("shop", collector)
        monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
        log = tmp_path / "relay.log"
        async with relay_process(env, log) as relay:
            async with database.connection() as connection:
                with provider.get_tracer("shop").start_as_current_span("checkout"):
                    async with connection.transaction():
                        event_id = await outbox.publish(
                            connection, "order.paid", {"order": 7}, key="order-7", autocommit=True
                        )
            await all_ended(database)
            await until(lambda: len(collector.spans) == 7, what="all spans to be pushed")
            await until(lambda: "outbox.events" in collector.metrics, what="metrics")
            assert await relay.end() == 0
        await asyncio.to_thread(provider.shutdown)
    by_name: dict[str, list[Span]] = {}
    for span in collector.spans:
        by_name.setdefault(span.name, []).append(span)
    (checkout,), (published,), (delivery,) = (
        by_name[name] for name in ("checkout", "publish order.paid", "deliver billing")
    )
    assert {span.trace_id for span in collector.spans} == {checkout.trace_id}
    assert (published.service, published.parent) == ("shop", checkout.id)
    assert (delivery.service, delivery.parent) == ("outbox-relay", published.id)
    attempts = sorted(by_name["send billing"], key=lambda span: span.start_s)
    assert [span.parent for span in attempts] == [delivery.id, delivery.id]
    assert [span.failed for span in attempts] == [True, False]
    assert [span.attributes["http.response.status_code"] for span in attempts] == [503, 204]
    assert [span.attributes["outbox.attempt"] for span in attempts] == [1, 2]
    received = by_name["POST /hooks"]
    assert {span.parent for span in received} == {span.id for span in attempts}
    assert {span.service for span in received} == {"receiver"}
    # From the commit to the acknowledgement, with all attempts inside.
    assert published.start_s <= delivery.start_s <= attempts[0].start_s
    assert attempts[1].end_s <= delivery.end_s + 1e-6
    assert delivery.attributes["messaging.message.id"] == str(event_id)
    assert delivery.attributes["outbox.outcome"] == "delivered"
    lines = [orjson.loads(line) for line in log.read_text().splitlines()]
    (failed,) = (line for line in lines if line["message"] == "attempt failed")
    assert failed["trace_id"] == checkout.trace_id
    # What a receiver or a customer quotes is found in the log.
    assert (failed["event_id"], failed["type"], failed["key"], failed["delivery_id"]) == (
        str(event_id), "order.paid", "order-7", delivery.attributes["outbox.delivery.id"]
    )  # fmt: skip
    assert not [line for line in lines if None in line.values()]
    assert attempts[0].attributes["server.address"] == "127.0.0.1"
    (point,) = collector.metrics["outbox.events"].sum.data_points
    assert (point.as_int or point.as_double) == 1


async def test_an_event_without_a_trace_gets_one_for_all_its_endpoints(
    database: Database, tmp_path: Path
) -> None:
    async with collecting() as collector, traced_receiver(collector, fail_first=0) as url:
        await add_endpoint(database, "one", url=url)
        await add_endpoint(database, "two", url=url)
        env = {
            "OUTBOX_DSN": database.dsn,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        async with relay_process(env, tmp_path / "relay.log"):
            await publish(database, 1)
            await until(lambda: len(collector.spans) == 6, what="all spans to be pushed")
    assert len({span.trace_id for span in collector.spans}) == 1
    roots = [span.name for span in collector.spans if not span.parent]
    assert sorted(roots) == ["deliver one", "deliver two"]


async def test_probes_and_metrics_of_a_relay(database: Database, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with collecting() as collector, traced_receiver(collector, fail_first=0) as receiver:
        await add_endpoint(database, "billing", url=receiver)
        env = {"OUTBOX_DSN": database.dsn, **health(port)}
        async with relay_process(env, tmp_path / "relay.log") as relay:

            async def ready() -> bool:
                return await status_or_none(f"{url}/readyz") == (200, "ready\n")

            await until(ready, what="it to be ready")
            assert await get(f"{url}/healthz") == (200, "ok\n")
            await publish(database, 1, 2, 3)
            await all_ended(database)
            status, text = await get(f"{url}/metrics")
            assert status == 200
            found = {family.name: family for family in text_string_to_metric_families(text)}
            ended = found["outbox_deliveries"].samples
            (delivered,) = (sample for sample in ended if sample.value)
            assert delivered.labels == {"endpoint": "billing", "outcome": "delivered"}
            assert delivered.value == 3
            (about,) = found["target_info"].samples
            assert about.labels["service_name"] == "outbox-relay"
            assert (await get(f"{url}/nothing"))[0] == 404
            assert await relay.end() == 0


async def test_an_address_in_use_is_reported_at_startup(database: Database, tmp_path: Path) -> None:
    log = tmp_path / "relay.log"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with relay_process({"OUTBOX_DSN": database.dsn, **health(port)}, log) as relay:
            assert relay.process is not None
            assert await relay.process.wait() == 3
    assert "cannot listen on 127.0.0.1" in log.read_text()
    assert await fetchval(database, "SELECT count(*) FROM journal WHERE actor LIKE 'replica%'") == 0


async def test_a_missing_exporter_is_reported(database: Database, tmp_path: Path) -> None:
    log = tmp_path / "relay.log"
    env = {"OUTBOX_DSN": database.dsn, "OTEL_TRACES_EXPORTER": "jaeger"}
    async with relay_process(env, log) as relay:
        assert relay.process is not None
        assert await relay.process.wait() == 2
    assert log.read_text() == (
        'outbox: OTEL_TRACES_EXPORTER: there is no exporter "jaeger"; use otlp, console or none\n'
    )


async def test_an_unreachable_collector_delays_nothing(database: Database, tmp_path: Path) -> None:
    """Neither deliveries nor the shutdown are delayed; a failed export is logged."""
    async with collecting() as collector, traced_receiver(collector, fail_first=0) as url:
        await add_endpoint(database, "billing", url=url)
        env = {
            "OUTBOX_DSN": database.dsn,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}",
            "OTEL_METRIC_EXPORT_INTERVAL": "50",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        log = tmp_path / "relay.log"
        async with relay_process(env, log) as relay:
            await publish(database, *range(20))
            await all_ended(database)
            await until(lambda: "Transient error" in log.read_text(), what="the warning")
            assert await relay.end() == 0
    assert all(orjson.loads(line) for line in log.read_text().splitlines()), "all of it is JSON"


async def test_systemd_is_notified(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify_socket:
        notify_socket.bind(str(path))
        notify_socket.setblocking(False)
        path.chmod(0o777)
        output: list[str] = []

        def has_received(text: str) -> Any:
            def receive() -> bool:
                try:
                    while True:
                        output.extend(notify_socket.recv(4096).decode().splitlines())
                except BlockingIOError:
                    return text in output

            return receive

        env = {
            "OUTBOX_DSN": database.dsn,
            "NOTIFY_SOCKET": str(path),
            "WATCHDOG_USEC": "200000",
        }
        async with relay_process(env, tmp_path / "relay.log") as relay:
            await until(has_received("READY=1"), what="READY")
            await until(has_received("STATUS=delivering"), what="STATUS")
            output.clear()
            for _ in range(3):
                await until(has_received("WATCHDOG=1"), what="WATCHDOG")
                output.clear()
            assert relay.process is not None
            relay.process.send_signal(signal.SIGTERM)
            await until(has_received("STOPPING=1"), what="STOPPING")
            assert await relay.process.wait() == 0
