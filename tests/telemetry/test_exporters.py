"""OpenTelemetry variables: what is pushed where, and how invalid values are reported."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import urllib3  # noqa: F401  (binds a socket when it is first imported)
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExportResult
from structlog.testing import capture_logs

from outbox.errors import UsageError
from outbox.telemetry.exporters import TelemetryExport, configure_export
from outbox.telemetry.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


def configure(env: Mapping[str, str]) -> TelemetryExport:
    return configure_export("me", "1", env)


def test_nothing_is_pushed_without_an_endpoint() -> None:
    configured = configure({})
    assert (configured.tracing, configured.metrics) == (None, None)


def test_a_general_endpoint_gets_metrics_and_traces() -> None:
    configured = configure(ENDPOINT)
    assert configured.tracing is not None
    assert type(configured.metrics).__module__.startswith("opentelemetry.exporter.otlp.proto.http")


def test_an_endpoint_of_one_signal_gets_only_that_signal() -> None:
    configured = configure(
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}
    )
    assert configured.tracing is not None
    assert configured.metrics is None


@pytest.mark.parametrize(
    "env",
    [
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "prometheus"},
    ],
)
def test_export_can_be_disabled(env: Mapping[str, str]) -> None:
    configured = configure(ENDPOINT | env)
    assert (configured.tracing, configured.metrics) == (None, None)


def test_the_console_exporter_prints_to_the_console() -> None:
    configured = configure({"OTEL_METRICS_EXPORTER": "console", "OTEL_TRACES_EXPORTER": "console"})
    assert isinstance(configured.metrics, ConsoleMetricExporter)
    assert configured.tracing is not None


@pytest.mark.parametrize(
    ("env", "output"),
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
            "exporting traces by OTLP over grpc needs a package that is not installed; use "
            "http/protobuf, or run: pip install 'opentelemetry-exporter-otlp-proto-grpc', or set "
            "OTEL_TRACES_EXPORTER=none",
        ),
        (
            {"OTEL_METRIC_EXPORT_INTERVAL": "1 minute"},
            'OTEL_METRIC_EXPORT_INTERVAL: "1 minute" is not a number of milliseconds',
        ),
    ],
)
def test_an_invalid_variable_is_a_one_line_error(env: Mapping[str, str], output: str) -> None:
    with pytest.raises(UsageError) as configured:
        configure(env)
    assert str(configured.value) == output


def test_the_resource_names_the_service_and_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    attributes = configure({}).resource.attributes
    assert attributes["service.name"] == "outbox-relay"
    assert attributes["service.instance.id"] == "me"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "hooks")
    assert configure({"OTEL_SERVICE_NAME": "hooks"}).resource.attributes["service.name"] == "hooks"


async def test_a_collector_that_fails_costs_one_line_and_no_final_push() -> None:
    pushed: list[Any] = []
    enough = asyncio.Event()
    loop = asyncio.get_running_loop()

    class RefusingExporter(ConsoleMetricExporter):
        def export(self, metrics_data: Any, *_: Any, **__: Any) -> MetricExportResult:
            pushed.append(metrics_data)
            if len(pushed) == 3:
                loop.call_soon_threadsafe(enough.set)
            return MetricExportResult.FAILURE

    configured = replace(
        configure({"OTEL_METRICS_EXPORTER": "console", "OTEL_METRIC_EXPORT_INTERVAL": "1"}),
        metrics=RefusingExporter(),
    )
    started, release = asyncio.Event(), asyncio.Event()

    async def collect() -> Snapshot:
        if len(pushed) == 3:  # The last push has ended, and failed.
            started.set()
            await release.wait()
        return Snapshot(0.0, 1.0, {})

    with capture_logs() as logs:
        task = asyncio.ensure_future(configured.push(collect))
        await enough.wait()
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(pushed) == 3
    assert [each["event"] for each in logs] == ["pushing metrics fails"]
    assert "did not accept" in logs[0]["reason"]


async def test_metrics_are_pushed_periodically_and_at_shutdown() -> None:
    pushed: list[Any] = []
    enough = asyncio.Event()
    loop = asyncio.get_running_loop()

    class ExporterThatFailsOnce(ConsoleMetricExporter):
        def export(self, metrics_data: Any, *_: Any, **__: Any) -> MetricExportResult:
            pushed.append(metrics_data)
            if len(pushed) == 3:
                loop.call_soon_threadsafe(enough.set)
            if len(pushed) == 1:
                raise OSError("the collector is unavailable")
            return MetricExportResult.SUCCESS

    configured = replace(
        configure({"OTEL_METRICS_EXPORTER": "console", "OTEL_METRIC_EXPORT_INTERVAL": "1"}),
        metrics=ExporterThatFailsOnce(),
    )

    async def collect() -> Snapshot:
        return Snapshot(0.0, 1.0, {})

    task = asyncio.ensure_future(configured.push(collect))
    await enough.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(pushed) >= 4, "a failed push is not repeated, and the last push is at the end"
    await configured.close()
