"""Log configuration of long-running commands: JSON lines, or colours on a terminal."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import orjson
import structlog

if TYPE_CHECKING:
    from outbox.config import Settings

TELEMETRY_LOG_EVERY_S = 300.0
"""Minimum interval between two lines of one logger of OpenTelemetry."""


def configure(settings: Settings) -> None:
    """Log to stderr, in the configured format and from the configured level."""
    human = settings.log_format == "console" or (
        settings.log_format == "auto" and sys.stderr.isatty()
    )
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if human:
        colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        processors.append(structlog.dev.ConsoleRenderer(colors=colors))
        factory: Any = structlog.PrintLoggerFactory(sys.stderr)
    else:
        processors += [
            structlog.processors.EventRenamer("message"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_one_line),
        ]
        factory = structlog.BytesLoggerFactory(sys.stderr.buffer)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(
            getattr(logging, settings.log_level.upper())
        ),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[ForwardToStructlog()], force=True)
    # OpenTelemetry logs a warning for every invalid tracestate header of a producer.
    logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)


class ForwardToStructlog(logging.Handler):
    """Forward log records of libraries to structlog."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # The exporters of OpenTelemetry log every attempt while a collector does not respond.
            if record.name.startswith("opentelemetry."):
                now = time.monotonic()
                if now - self._logged_at.get(record.name, -math.inf) < TELEMETRY_LOG_EVERY_S:
                    return
                self._logged_at[record.name] = now
            # Round to a level that structlog knows, and keep the message on one line.
            level = min(record.levelno // 10 * 10, logging.CRITICAL)
            text = " ".join(record.getMessage().split())
            structlog.get_logger(record.name).log(
                level, text, logger=record.name, exc_info=record.exc_info
            )
        except Exception:
            self.handleError(record)


def _one_line(value: Any, **_: Any) -> bytes:
    return orjson.dumps(value, default=str)
