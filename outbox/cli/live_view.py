"""Live status view on the terminal's alternate screen."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outbox.cli import summary as view
from outbox.cli.output import cell, rich_table
from outbox.core.model.text import count, safe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from rich.console import Console, RenderableType

    from outbox.operations.status import Overview

NOTES_SHARE = 2
"""Notes get at most 1/2 of the remaining lines if the endpoints need the space as well."""


class Screen:
    """A status view that is redrawn in place on the alternate screen."""

    def __init__(self, console: Console, interval_s: float) -> None:
        from rich.live import Live

        self._console = console
        self._interval_s = interval_s
        self._shown: Overview | None = None
        self._unavailable: str | None = None
        self.live = Live(console=console, screen=True, auto_refresh=False)

    def show(self, overview: Overview) -> None:
        self._shown, self._unavailable = overview, None
        self.draw()

    def show_unavailable(self, reason: str, since: datetime) -> None:
        self._unavailable = unavailable_text(reason, since)
        self.draw()

    def draw(self) -> None:
        """Redraw the latest overview at the terminal's current size."""
        if self._shown is not None:
            self.live.update(picture(self._console, self._shown, self._footer()))
            self.live.refresh()

    def _footer(self) -> str:
        return self._unavailable or f"every {self._interval_s:g} s; q to quit"


def picture(console: Console, overview: Overview, footer: str) -> RenderableType:
    """Lay out an overview for the console's size; the foot is always shown."""
    from rich.console import Group
    from rich.text import Text

    width, height = console.size

    def wrapped(text: str) -> list[Text]:
        return list(Text(safe(text)).wrap(console, width, no_wrap=False))

    named = [(name, cell(value)) for name, value in view.pairs(overview) if value is not None]
    named.insert(0, ("read at", cell(overview.at)))
    name_chars = max(len(name) for name, _ in named)
    parts: list[RenderableType] = [
        Text.assemble(
            (name.ljust(name_chars), "dim"), "  ", value, no_wrap=True, overflow="ellipsis"
        )
        for name, value in named
    ]
    used = len(named)
    footer_lines = wrapped(footer)
    if relays := view.relay_rows(overview):
        table, _ = rich_table(view.RELAY_COLUMNS, relays, width)
        parts += [Text(), table]
        used += len(relays) + 2
    # A blank line and the headings, a blank line and the foot.
    room = max(height - used - 3 - len(footer_lines), 1)
    notes = [line for note in view.notes(overview) for line in wrapped(note)]
    endpoints = overview.endpoints
    if len(endpoints) + len(notes) + bool(notes) > room:
        shown = max(room - len(notes) - 2, room // NOTES_SHARE)
        endpoints = endpoints[:shown]
        notes = notes[: max(room - len(endpoints) - 2, 0)]
    parts.append(Text())
    if overview.endpoints:
        table, _ = rich_table(
            view.ENDPOINT_COLUMNS, [view.endpoint_row(e) for e in endpoints], width
        )
        parts.append(table)
    else:
        parts.append(Text(view.NO_ENDPOINTS))
    if rest := overview.endpoints_total - len(endpoints):
        parts.append(Text(f"and {count(rest, 'endpoint')} more", style="dim"))
    if notes:
        parts += [Text(), *notes]
    return Group(*parts, Text(), *(Text(str(line), style="dim") for line in footer_lines))


def unavailable_text(reason: str, since: datetime) -> str:
    return f"database unavailable since {since.astimezone():%H:%M:%S}, retrying: {reason}"


@contextmanager
def on_screen(console: Console, interval_s: float, stop: asyncio.Event) -> Iterator[Screen]:
    """Open the alternate screen, and restore the terminal afterwards; q sets `stop`."""
    screen = Screen(console, interval_s)
    loop = asyncio.get_running_loop()
    with _keys(stop), screen.live:
        loop.add_signal_handler(signal.SIGWINCH, screen.draw)
        try:
            yield screen
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)


@contextmanager
def _keys(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` on q, if the process is in the terminal's foreground."""
    try:
        keyboard = sys.stdin.fileno()
        # In the background, key presses belong to the foreground process.
        if os.tcgetpgrp(keyboard) != os.getpgrp():
            raise OSError
        # Open the terminal again: O_NONBLOCK on stdin would also affect the shell.
        unblocked = os.open("/dev/tty", os.O_RDONLY | os.O_NONBLOCK)
    except (AttributeError, OSError, ValueError):
        yield
        return
    import termios
    import tty

    loop = asyncio.get_running_loop()

    def pressed() -> None:
        try:
            keys = os.read(unblocked, 64)
        except BlockingIOError:
            # Ctrl-C flushed the input after the wake-up. A blocking read would keep the
            # loop from handling the signal.
            return
        if b"q" in keys.lower() or not keys:
            stop.set()
            loop.remove_reader(keyboard)

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    # Watch stdin, because some systems' event loops cannot watch /dev/tty.
    loop.add_reader(keyboard, pressed)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        os.close(unblocked)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
