"""A process of the API's priority that only computes: it shares nothing with the relay.

It computes for about `BUSY_S` of every `BUSY_S + IDLE_S`, as much as the API does for 4 clients and
the clients themselves, and prints an empty JSON object at the start. It ends at the end of stdin.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from benchmarks.api_clients import NICE
from benchmarks.receiver import say

BUSY_S, IDLE_S = 0.002, 0.000_2
"""The kernel adds tens of microseconds to every sleep."""


def compute() -> None:
    """Compute and sleep in turn."""
    while True:
        until = time.perf_counter() + BUSY_S
        while time.perf_counter() < until:
            sum(range(200))
        time.sleep(IDLE_S)


if __name__ == "__main__":
    os.nice(NICE)
    threading.Thread(target=compute, daemon=True).start()
    say({})
    sys.stdin.read()
