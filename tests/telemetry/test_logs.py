"""The log of long-running commands: what is left out of it."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from structlog.testing import capture_logs

from outbox.config import Settings
from outbox.core.model.text import safe, safe_lines
from outbox.telemetry.logs import ForwardToStructlog, configure

if TYPE_CHECKING:
    from collections.abc import Iterator

HIDDEN = "\u202e\u200b\x9b31m\x1b[8m\x7f\r"
SHOWN = safe("\u202e")


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


@contextmanager
def configured(log_format: str) -> Iterator[None]:
    """The log of a process in this format, during the block."""
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    try:
        configure(Settings(log_format=log_format))
        yield
    finally:
        structlog.configure(**before)
        root.handlers[:], root.level = handlers, level


def test_a_traceback_on_a_terminal_shows_no_variables(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would show those of each frame."""
    with configured("console"):
        secret = "".join(["can", "ary"])
        try:
            raise ValueError("for a reason")
        except ValueError as error:
            structlog.get_logger("outbox.test").error("it failed", exc_info=error, n=len(secret))
    shown = capsys.readouterr().err
    assert "for a reason" in shown
    assert "canary" not in shown


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_line_shows_no_hidden_character(
    capfdbinary: pytest.CaptureFixture[bytes], log_format: str
) -> None:
    with configured(log_format):
        log = structlog.get_logger("outbox.test")
        try:
            raise ValueError(HIDDEN)
        except ValueError as error:
            log.warning(
                HIDDEN, reason=HIDDEN, keys=[HIDDEN], named={HIDDEN: HIDDEN}, exc_info=error
            )
    shown = capfdbinary.readouterr().err.decode()
    assert shown.count(SHOWN) >= 6
    assert safe_lines(shown) == shown
