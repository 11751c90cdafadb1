"""OpenTelemetry's variables: what is pushed where, and what is said of those that make no sense."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExportResult

from outbox.errors import UsageError
from outbox.telemetry.exporters import Exporting, exporting
from outbox.telemetry.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


def asked(env: Mapping[str, str]) -> Exporting:
    return exporting("me", "1", env)


def test_nothing_is_pushed_unless_somebody_says_where() -> None:
    told = asked({})
    assert (told.tracing, told.metrics) == (None, None)


def test_an_endpoint_gets_both() -> None:
    told = asked(ENDPOINT)
    assert told.tracing is not None
    assert type(told.metrics).__module__.startswith("opentelemetry.exporter.otlp.proto.http")


def test_an_endpoint_of_one_signal_gets_that() -> None:
    told = asked({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"})
    assert told.tracing is not None
    assert told.metrics is None


@pytest.mark.parametrize(
    "env",
    [
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "prometheus"},
    ],
)
def test_it_can_be_turned_off(env: Mapping[str, str]) -> None:
    told = asked(ENDPOINT | env)
    assert (told.tracing, told.metrics) == (None, None)


def test_the_console_is_for_looking() -> None:
    told = asked({"OTEL_METRICS_EXPORTER": "console", "OTEL_TRACES_EXPORTER": "console"})
    assert isinstance(told.metrics, ConsoleMetricExporter)
    assert told.tracing is not None


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            'OTEL_TRACES_EXPORTER: there is no exporter "zipkin"; use otlp, console or none',
        ),
        (
            {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            'OTEL_EXPORTER_OTLP_PROTOCOL: there is no protocol "http/json"; '
            "use http/protobuf or grpc",
        ),
        (
            {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "traces are to be pushed by OTLP over grpc, which is not installed: pip install "
            "'opentelemetry-exporter-otlp-proto-grpc', or set OTEL_TRACES_EXPORTER=none",
        ),
        (
            {"OTEL_METRIC_EXPORT_INTERVAL": "1 minute"},
            'OTEL_METRIC_EXPORT_INTERVAL: "1 minute" is not a number of milliseconds',
        ),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(env: Mapping[str, str], said: str) -> None:
    with pytest.raises(UsageError) as told:
        asked(env)
    assert str(told.value) == said


def test_the_resource_names_the_service_and_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    attributes = asked({}).resource.attributes
    assert attributes["service.name"] == "outbox-relay"
    assert attributes["service.instance.id"] == "me"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "hooks")
    assert asked({"OTEL_SERVICE_NAME": "hooks"}).resource.attributes["service.name"] == "hooks"


async def test_metrics_are_pushed_again_and_again_and_at_the_end() -> None:
    pushed: list[Any] = []
    enough = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Kept(ConsoleMetricExporter):
        def export(self, metrics_data: Any, *_: Any, **__: Any) -> MetricExportResult:
            pushed.append(metrics_data)
            if len(pushed) == 2:
                loop.call_soon_threadsafe(enough.set)
            if len(pushed) == 1:
                raise OSError("the collector is away")
            return MetricExportResult.SUCCESS

    told = asked({"OTEL_METRICS_EXPORTER": "console", "OTEL_METRIC_EXPORT_INTERVAL": "1"})
    told = Exporting(
        told.resource, None, None, Kept(), told.interval_s, told.timeout_s, told.delta, "1"
    )

    async def collect() -> Snapshot:
        return Snapshot(0.0, 1.0, {})

    task = asyncio.ensure_future(told.push(collect))
    await enough.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(pushed) >= 3, "what failed is over, and the last push is at the end"
    await told.close()
