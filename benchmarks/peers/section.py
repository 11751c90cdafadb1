"""The section: how many deliveries a second, beside everybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers import throughput
from benchmarks.peers.contestants import CONTESTANTS

if TYPE_CHECKING:
    from benchmarks.figures import Row
    from benchmarks.stage import Stage

QUICK_SHARE = 0.1


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Everybody in turns, round by round."""
    return await throughput.run(stage, rounds, CONTESTANTS, QUICK_SHARE if quick else 1.0)
