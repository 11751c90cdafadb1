"""Export of traces and metrics, configured by OpenTelemetry's variables.

    OTEL_EXPORTER_OTLP_ENDPOINT      http://collector:4318; without it there is no push
    OTEL_TRACES_EXPORTER             otlp, console or none
    OTEL_METRICS_EXPORTER            otlp, console, none, or prometheus (the health listener has it)
    OTEL_TRACES_SAMPLER[_ARG]        parentbased_traceidratio and 0.01: one event of a hundred
    OTEL_METRIC_EXPORT_INTERVAL      milliseconds between two pushes of metrics
    OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_…, OTEL_EXPORTER_OTLP_…, OTEL_SDK_DISABLED

The SDK and its exporters read most of them directly.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    MetricExporter,
    MetricExportResult,
    MetricsData,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
    SpanExporter,
)

from outbox.errors import UsageError
from outbox.extras import install_hint
from outbox.telemetry.otlp import OtlpConverter
from outbox.telemetry.sampling import configure_sampling
from outbox.telemetry.tracing import PresetIdGenerator, Tracing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from outbox.telemetry.snapshot import Snapshot

log = structlog.get_logger("outbox.telemetry")

SERVICE_NAME = "outbox-relay"
INTERVAL_MS, TIMEOUT_MS = 60_000, 30_000
"""OpenTelemetry's defaults."""
FINAL_PUSH_TIMEOUT_S = 0.4
"""Time-out of the final push of metrics at shutdown, and of that of spans after it."""

_SIGNALS = {"traces": "OTLPSpanExporter", "metrics": "OTLPMetricExporter"}
_MODULES = {
    ("http/protobuf", "traces"): "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    ("http/protobuf", "metrics"): "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    ("grpc", "traces"): "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    ("grpc", "metrics"): "opentelemetry.exporter.otlp.proto.grpc.metric_exporter",
}
_GRPC = "opentelemetry-exporter-otlp-proto-grpc"


@dataclass(frozen=True, slots=True)
class TelemetryExport:
    """The configured exporters of a process."""

    resource: Resource
    provider: TracerProvider | None
    tracing: Tracing | None
    """The tracing; None: it is off."""
    metrics: MetricExporter | None
    interval_s: float
    timeout_s: float
    delta: bool
    version: str

    async def push(self, collect: Callable[[], Awaitable[Snapshot]]) -> None:
        """Push metrics until cancelled, and once more at the end unless the last push failed.

        The first failure of a row is logged, and the success after it.
        """
        if self.metrics is None:
            return
        data = OtlpConverter(self.resource, self.version, delta=self.delta)
        is_failing = False
        try:
            while True:
                await asyncio.sleep(self.interval_s)
                reason = await self._push(data, collect, self.timeout_s)
                if reason is not None and not is_failing:
                    log.warning("pushing metrics fails", reason=reason)
                elif reason is None and is_failing:
                    log.info("metrics are pushed again")
                is_failing = reason is not None
        finally:
            if not is_failing:
                await self._push(data, collect, min(FINAL_PUSH_TIMEOUT_S, self.timeout_s))

    async def _push(
        self, data: OtlpConverter, collect: Callable[[], Awaitable[Snapshot]], timeout_s: float
    ) -> str | None:
        """Push once; return why that failed.  An error must not stop the relay."""
        assert self.metrics is not None
        try:
            pushed = data.convert(await collect())
            # An exporter may ignore its time-out.
            async with asyncio.timeout(timeout_s):
                await run_in_daemon_thread(self._export, pushed, timeout_s * 1000)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _export(self, pushed: MetricsData, timeout_ms: float) -> None:
        assert self.metrics is not None
        if self.metrics.export(pushed, timeout_ms) is not MetricExportResult.SUCCESS:
            raise OSError("the collector did not accept the metrics")

    async def close(self) -> None:
        """Push the remaining spans and shut down, within a bounded time."""
        for shutdown in (self._close_traces, self._close_metrics):
            try:
                async with asyncio.timeout(FINAL_PUSH_TIMEOUT_S):
                    await run_in_daemon_thread(shutdown)
            except TimeoutError:
                log.warning("the final push of telemetry timed out", timeout_s=FINAL_PUSH_TIMEOUT_S)

    def _close_traces(self) -> None:
        if self.provider is not None:
            self.provider.shutdown()

    def _close_metrics(self) -> None:
        if self.metrics is not None:
            self.metrics.shutdown(timeout_millis=FINAL_PUSH_TIMEOUT_S * 1000)


async def run_in_daemon_thread(call: Callable[..., object], *arguments: object) -> None:
    """Call a function in a daemon thread and raise its exception here.

    The process waits for threads of the loop's executor at exit, and an exporter can hang on an
    unresponsive collector; it does not wait for daemon threads.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def work() -> None:
        failed: BaseException | None = None
        try:
            call(*arguments)
        except BaseException as error:
            failed = error
        # The loop may be closed already.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, failed)

    threading.Thread(target=work, name="outbox-telemetry", daemon=True).start()
    await done


def configure_export(
    instance: str, version: str, env: Mapping[str, str] | None = None
) -> TelemetryExport:
    """Create the exporters that the environment configures.

    Args:
        instance: the name of this replica.
        version: the version of this program.
        env: replaces the process's environment; the SDK still reads the latter.

    Raises:
        UsageError: a variable has an invalid value, or a package is missing.
    """
    env = os.environ if env is None else env
    resource = _resource(instance, version, env)
    disabled = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    spans: SpanExporter | None = None if disabled else _exporter("traces", env)
    metrics: MetricExporter | None = None if disabled else _exporter("metrics", env)
    provider = tracing = None
    if spans is not None:
        ids, chosen = PresetIdGenerator(), configure_sampling(env)
        provider = TracerProvider(chosen.sampler, resource, id_generator=ids)
        console = isinstance(spans, ConsoleSpanExporter)
        provider.add_span_processor(
            SimpleSpanProcessor(spans) if console else BatchSpanProcessor(spans)
        )
        tracing = Tracing(provider, ids, chosen)
    preference = env.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "").strip().lower()
    return TelemetryExport(
        resource,
        provider,
        tracing,
        metrics,
        _milliseconds("OTEL_METRIC_EXPORT_INTERVAL", INTERVAL_MS, env) / 1000,
        _milliseconds("OTEL_METRIC_EXPORT_TIMEOUT", TIMEOUT_MS, env) / 1000,
        preference in ("delta", "lowmemory"),
        version,
    )


def _resource(instance: str, version: str, env: Mapping[str, str]) -> Resource:
    ours = {"service.version": version, "service.instance.id": instance}
    named = env.get("OTEL_SERVICE_NAME") or "service.name=" in env.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    if not named:
        ours["service.name"] = SERVICE_NAME
    return Resource.create(ours)


def _exporter(signal: str, env: Mapping[str, str]) -> Any:
    """The exporter of a signal; None: the signal is not exported."""
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    chosen = env.get(variable, "").strip().lower()
    if not chosen:
        chosen = "otlp" if any(env.get(name) for name in endpoints) else "none"
    if chosen == "none" or (chosen == "prometheus" and signal == "metrics"):
        return None
    if chosen == "console":
        return ConsoleSpanExporter() if signal == "traces" else ConsoleMetricExporter()
    if chosen != "otlp":
        known = (
            "otlp, console or none" if signal == "traces" else "otlp, prometheus, console or none"
        )
        raise UsageError(f'{variable}: there is no exporter "{chosen}"; use {known}')
    own, common = f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = (env.get(own) or env.get(common) or "http/protobuf").strip()
    if (protocol, signal) not in _MODULES:
        named = own if env.get(own) else common
        raise UsageError(f'{named}: there is no protocol "{protocol}"; use http/protobuf or grpc')
    try:
        module = importlib.import_module(_MODULES[protocol, signal])
    except ImportError:
        hint = install_hint("outbox-relay[otlp]", "otlp")
        if protocol == "grpc":
            hint = f"use http/protobuf, or run: pip install '{_GRPC}'"
        raise UsageError(
            f"exporting {signal} by OTLP over {protocol} needs a package that is not installed; "
            f"{hint}, or set {variable}=none"
        ) from None
    return getattr(module, _SIGNALS[signal])()


def _milliseconds(name: str, default: int, env: Mapping[str, str]) -> float:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e10:
        raise UsageError(f'{name}: "{text}" is not a number of milliseconds')
    return value
