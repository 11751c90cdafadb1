"""A relay with a sampling profiler on CPU time.

A separate process: `python -m benchmarks.sampled FILE` is `outbox relay` that, when it ends,
writes a line to the file for every sampled stack, outermost function first:

    5 outbox/relay/session.py:Session._work;outbox/relay/relay.py:Relay.run

A timer signal interrupts it between two bytecode instructions. Time in C code and in the system
is attributed to the calling function, and the event loop's own time to its next callee.
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
"""The sampling interval in seconds of CPU time, or one tick of the system's clock."""
LOOP = "asyncio/runners.py"
"""Frames below this one are the same in every program."""
ROOTS = tuple(f"{path}/" for path in sorted(sys.path, key=len, reverse=True) if path)


class Sampler:
    """Counts stacks."""

    def __init__(self) -> None:
        self._met: Counter[tuple[CodeType, ...]] = Counter()

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        stack: list[CodeType] = []
        while frame is not None:
            stack.append(frame.f_code)
            frame = frame.f_back
        self._met[tuple(stack)] += 1

    def lines(self) -> list[str]:
        """Return the stacks that were sampled in the event loop."""
        lines: list[str] = []
        for stack, times in self._met.items():
            names = [named(code) for code in reversed(stack)]
            begins = [n for n, name in enumerate(names, 1) if name.startswith(LOOP)]
            if begins:
                lines.append(f"{times} {';'.join(names[begins[-1] :])}")
        return lines


def named(code: CodeType) -> str:
    """Return a function's name with its file as an import path."""
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
