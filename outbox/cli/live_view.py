"""An overview as one picture on the terminal's other screen, which changes in place."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outbox.cli import summary as view
from outbox.cli.output import cell, count, rich_table
from outbox.core.model.text import safe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from rich.console import Console, RenderableType

    from outbox.operations.status import Overview

NOTES_SHARE = 2
"""Notes get at most one in so many lines that are left, where the endpoints need them, too."""


class Screen:
    """One picture on the terminal's other screen."""

    def __init__(self, console: Console, schema: str, interval_s: float) -> None:
        from rich.live import Live

        self._console = console
        self._schema = schema
        self._interval_s = interval_s
        self._shown: Overview | None = None
        self._away: str | None = None
        self.live = Live(console=console, screen=True, auto_refresh=False)

    def show(self, overview: Overview) -> None:
        self._shown, self._away = overview, None
        self.draw()

    def away(self, why: str, since: datetime) -> None:
        self._away = away_text(why, since)
        self.draw()

    def draw(self) -> None:
        """Draw what there is, to the size that the terminal has now."""
        if self._shown is not None:
            self.live.update(picture(self._console, self._schema, self._shown, self._foot()))
            self.live.refresh()

    def _foot(self) -> str:
        return self._away or f"every {self._interval_s:g} s; q ends it"


def picture(console: Console, schema: str, overview: Overview, foot: str) -> RenderableType:
    """As much of an overview as the console's size holds, the foot in any case."""
    from rich.console import Group
    from rich.text import Text

    width, height = console.size

    def wrapped(text: str) -> list[Text]:
        return list(Text(safe(text)).wrap(console, width, no_wrap=False))

    named = [
        (name, cell(value)) for name, value in view.pairs(schema, overview) if value is not None
    ]
    named.insert(0, ("seen at", cell(overview.at)))
    name_chars = max(len(name) for name, _ in named)
    parts: list[RenderableType] = [
        Text.assemble(
            (name.ljust(name_chars), "dim"), "  ", value, no_wrap=True, overflow="ellipsis"
        )
        for name, value in named
    ]
    used = len(named)
    foot_lines = wrapped(foot)
    if relays := view.relay_rows(overview):
        table, _ = rich_table(view.RELAY_COLUMNS, relays, width)
        parts += [Text(), table]
        used += len(relays) + 2
    # A blank line and the headings, a blank line and the foot.
    room = max(height - used - 3 - len(foot_lines), 1)
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
    return Group(*parts, Text(), *(Text(str(line), style="dim") for line in foot_lines))


def away_text(why: str, since: datetime) -> str:
    """For when the database is away."""
    return f"nothing seen since {since.astimezone():%H:%M:%S}, trying again: {why}"


@contextmanager
def on_screen(
    console: Console, schema: str, interval_s: float, stop: asyncio.Event
) -> Iterator[Screen]:
    """The screen, given back at the end as it was; q sets `stop`."""
    screen = Screen(console, schema, interval_s)
    loop = asyncio.get_running_loop()
    with _keys(stop), screen.live:
        loop.add_signal_handler(signal.SIGWINCH, screen.draw)
        try:
            yield screen
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)


@contextmanager
def _keys(stop: asyncio.Event) -> Iterator[None]:
    """q ends it, if there are keys to read."""
    try:
        keyboard = sys.stdin.fileno()
        # In the background the keys are another program's.
        if os.tcgetpgrp(keyboard) != os.getpgrp():
            raise OSError
        # The same terminal, opened anew: stdin itself is shared with the shell.
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
            # A Ctrl-C threw away the key that was seen. To wait for another one
            # would keep the loop from hearing the Ctrl-C.
            return
        if b"q" in keys.lower() or not keys:
            stop.set()
            loop.remove_reader(keyboard)

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    # Seen at stdin, because not every system's loop can watch /dev/tty.
    loop.add_reader(keyboard, pressed)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        os.close(unblocked)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
