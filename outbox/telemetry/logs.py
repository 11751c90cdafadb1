"""Log configuration of long-running commands: JSON lines, or colours on a terminal.

The texts of libraries and of their exceptions contain what clients and servers have sent, such as
a malformed request with its token.  So the log shows of a library's record where it was made and
the type of its exception, and one of a place in a minute.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import time
import traceback
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TextIO

import orjson
import structlog

from outbox.core.model.text import safe, safe_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from outbox.config import Settings

TELEMETRY_LOG_EVERY_S = 300.0
"""Minimum interval between two lines of one logger of OpenTelemetry."""
LIBRARY_LOG_EVERY_S = 60.0
"""Minimum interval between two lines of one place in another library."""
FRAMES_MAX = 10


def configure(settings: Settings) -> None:
    """Log to stderr, in the configured format and from the configured level."""
    human = settings.log_format == "console" or (
        settings.log_format == "auto" and sys.stderr.isatty()
    )
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _drop_unknown,
    ]
    if human:
        colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        processors += [
            _escape_texts,
            structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_format_traceback),
        ]
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
        self._logged_at: dict[object, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        try:
            is_ours = record.name.partition(".")[0].startswith("outbox")
            place: object = record.name, record.pathname, record.lineno
            every_s = LIBRARY_LOG_EVERY_S
            # The exporters of OpenTelemetry log every attempt while a collector does not respond.
            if is_telemetry := record.name.startswith("opentelemetry."):
                place, every_s = record.name, TELEMETRY_LOG_EVERY_S
            if not is_ours:
                now = time.monotonic()
                if now - self._logged_at.get(place, -math.inf) < every_s:
                    return
                self._logged_at[place] = now
            # Round to a level that structlog knows, and keep the message on one line.
            level = min(record.levelno // 10 * 10, logging.CRITICAL)
            log = structlog.get_logger(record.name)
            if is_ours or is_telemetry:
                text = " ".join(record.getMessage().split())
                log.log(level, text, logger=record.name, exc_info=record.exc_info)
            else:
                error = record.exc_info[1] if record.exc_info else None
                at = f"{PurePath(record.pathname).name}:{record.lineno}"
                # Without arguments, the message itself may be made of what was received.
                text = str(record.msg) if record.args else "a library reports a problem"
                log.log(level, text, logger=record.name, at=at, **describe_without_text(error))
        except Exception:
            self.handleError(record)


def describe_without_text(error: BaseException | None) -> dict[str, Any]:
    """The type of an exception and its last frames, as fields of a log line.

    Its text may contain what a client has sent, such as the value of a parameter.
    """
    if error is None:
        return {}
    frames = traceback.extract_tb(error.__traceback__, -FRAMES_MAX)
    return {
        "error": f"{type(error).__module__}.{type(error).__qualname__}",
        "frames": [f"{PurePath(each.filename).name}:{each.lineno} {each.name}" for each in frames],
    }


def _one_line(value: Any, **_: Any) -> bytes:
    return safe(orjson.dumps(value, default=str).decode()).encode()


def _drop_unknown(_: Any, __: str, fields: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Leave out what has no value."""
    return {name: value for name, value in fields.items() if value is not None}


def _escape_texts(_: Any, __: str, fields: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Escape what would control a terminal; other values are shown by their repr, which does so."""
    return {
        name: safe(value) if isinstance(value, str) else value for name, value in fields.items()
    }


def _format_traceback(out: TextIO, error: Any) -> None:
    """Write a traceback without the variables of frames, which structlog shows if there is Rich."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    out.write(safe_lines(text.getvalue()))
