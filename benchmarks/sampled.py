"""A relay that notes, at even steps of processor time, what it is at.

A process of its own: `python -m benchmarks.sampled FILE` is `outbox relay` that, when it ends,
leaves a line in the file for every stack that was met, outermost function first:

    5 outbox/relay/session.py:Session._work;outbox/relay/relay.py:Relay.run

The signal of a timer interrupts it between two steps of Python; what C code takes, and the
system, counts for the function that called it, and the loop's own time for whom it calls next.
"""

from __future__ import annotations

import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.cli.main import main

if TYPE_CHECKING:
    from types import CodeType, FrameType

EVERY_S = 0.001
"""Of processor time, or as often as the system's clock ticks."""
LOOP = "asyncio/runners.py"
"""Whatever began below this is how every program begins."""
ROOTS = tuple(f"{path}/" for path in sorted(sys.path, key=len, reverse=True) if path)


class Sampler:
    """Counts stacks."""

    def __init__(self) -> None:
        self._met: Counter[tuple[CodeType, ...]] = Counter()

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._take)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _take(self, _: int, frame: FrameType | None) -> None:
        stack: list[CodeType] = []
        while frame is not None:
            stack.append(frame.f_code)
            frame = frame.f_back
        self._met[tuple(stack)] += 1

    def lines(self) -> list[str]:
        """What was met in the event loop."""
        lines: list[str] = []
        for stack, times in self._met.items():
            names = [named(code) for code in reversed(stack)]
            begins = [n for n, name in enumerate(names, 1) if name.startswith(LOOP)]
            if begins:
                lines.append(f"{times} {';'.join(names[begins[-1] :])}")
        return lines


def named(code: CodeType) -> str:
    """A function, and its file as one imports it."""
    path = code.co_filename
    root = next((root for root in ROOTS if path.startswith(root)), "")
    return f"{path[len(root) :]}:{code.co_qualname}"


if __name__ == "__main__":
    sampler = Sampler()
    sampler.start()
    try:
        main(["relay"])
    finally:
        sampler.stop()
        Path(sys.argv[1]).write_text("\n".join(sampler.lines()), "utf-8")
