"""The log of long-running commands: what is left out of it."""

from __future__ import annotations

import logging

from structlog.testing import capture_logs

from outbox.telemetry.logs import ForwardToStructlog


def test_a_collector_that_hangs_costs_one_line() -> None:
    """The exporters of OpenTelemetry log every attempt."""
    handler = ForwardToStructlog()
    with capture_logs() as logs:
        for name in ("opentelemetry.exporter.otlp", "asyncpg", "opentelemetry.exporter.otlp"):
            record = logging.LogRecord(name, logging.WARNING, "", 0, "retry", (), None)
            handler.handle(record)
            handler.handle(record)
    names = [each["logger"] for each in logs]
    assert names == ["opentelemetry.exporter.otlp", "asyncpg", "asyncpg"]
