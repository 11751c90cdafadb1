"""The section "peers": deliveries per second and latency of all contestants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers import latency, throughput
from benchmarks.peers.contestants import CONTESTANTS

if TYPE_CHECKING:
    from benchmarks.figures import Row
    from benchmarks.stage import Stage

QUICK_SHARE = 0.1
"""Rounds of the backlog measurement."""
SECONDS, QUICK_SECONDS = 5.0, 1.0
"""Rounds of the latency measurement at a thousand events per second."""


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Run all contestants alternately, round by round."""
    share, seconds = (QUICK_SHARE, QUICK_SECONDS) if quick else (1.0, SECONDS)
    return [
        *await throughput.run(stage, rounds, CONTESTANTS, share),
        *await latency.run(stage, rounds, CONTESTANTS, seconds),
    ]
