"""The log of long-running commands: what is left out of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import structlog
from structlog.testing import capture_logs

from outbox.config import Settings
from outbox.telemetry.logs import ForwardToStructlog, configure

if TYPE_CHECKING:
    import pytest


def emitted(handler: ForwardToStructlog, name: str, *values: Any, error: Any = None) -> Any:
    """What the log shows of a record."""
    text = values[0] if values else "retry"
    info = (type(error), error, error.__traceback__) if error else None
    record = logging.LogRecord(name, logging.WARNING, "/x/y.py", 7, text, values[1:], info)
    with capture_logs() as logs:
        handler.handle(record)
    return [{key: each[key] for key in each if key != "log_level"} for each in logs]


def test_a_collector_that_hangs_costs_one_line() -> None:
    """The exporters of OpenTelemetry log every attempt."""
    handler = ForwardToStructlog()
    names = "opentelemetry.exporter.otlp", "outbox.web", "opentelemetry.exporter.otlp", "outbox.web"
    lines = [line for name in names for line in emitted(handler, name)]
    assert [line["logger"] for line in lines] == [names[0], "outbox.web", "outbox.web"]


def test_a_record_of_a_library_has_no_text_that_it_received() -> None:
    """A malformed request, a value that PostgreSQL refused, what a broker's server has sent."""
    handler = ForwardToStructlog()
    try:
        raise ValueError("b'Authorization: Bearer canary'")
    except ValueError as error:
        (line,) = emitted(handler, "aiohttp.server", "Error from %s", "canary", error=error)
    assert line["event"] == "Error from %s"
    assert (line["logger"], line["at"], line["error"]) == (
        "aiohttp.server",
        "y.py:7",
        "builtins.ValueError",
    )
    assert line["frames"][0].startswith("test_logs.py:")
    assert "canary" not in str(line)
    # A text without arguments may be formatted already, as those of asyncio are.
    (line,) = emitted(handler, "asyncio", "Exception in callback f(b'canary')")
    assert line == {"event": "a library reports a problem", "logger": "asyncio", "at": "y.py:7"}
    # Once a minute for each place in a library.
    assert emitted(handler, "asyncio", "canary") == []


def test_a_traceback_on_a_terminal_shows_no_variables(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would show those of each frame."""
    root, configured = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    try:
        configure(Settings(log_format="console"))
        secret = "".join(["can", "ary"])
        try:
            raise ValueError("for a reason")
        except ValueError as error:
            structlog.get_logger("outbox.test").error("it failed", exc_info=error, n=len(secret))
    finally:
        structlog.configure(**configured)
        root.handlers[:], root.level = handlers, level
    shown = capsys.readouterr().err
    assert "for a reason" in shown
    assert "canary" not in shown
