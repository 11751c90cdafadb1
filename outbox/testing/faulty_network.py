"""A network on a bad day: it loses, copies, holds back and reorders what is sent."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.receiver.requests import Request


class Weather:
    """Spoils a series of requests, the same each time for the same seed.

    Args:
        seed: of its choices.
        loses: the share of requests that never arrive.
        copies: the share that arrives twice, the second time at any place behind.
        reorders: by how many places a request may be overtaken.

    Raises:
        UsageError: a share is none, or `reorders` is negative.
    """

    def __init__(
        self, seed: int = 0, *, loses: float = 0.0, copies: float = 0.0, reorders: int = 0
    ) -> None:
        for name, share in (("loses", loses), ("copies", copies)):
            if not 0.0 <= share <= 1.0:
                raise UsageError(f"{name}: must be between 0 and 1, not {share:g}")
        if reorders < 0:
            raise UsageError(f"reorders: must be 0 or more, not {reorders}")
        self._rng = random.Random(seed)  # noqa: S311  nothing secret hangs on it
        self._loses, self._copies, self._reorders = loses, copies, reorders

    def through(self, requests: Iterable[Request]) -> list[Request]:
        """What arrives of them, in the order in which it does."""
        rng = self._rng
        sent = list(requests)
        arrive: list[tuple[float, Request]] = []
        for place, request in enumerate(sent):
            if rng.random() < self._loses:
                continue
            arrive.append((place + rng.random() * (self._reorders + 1e-9), request))
            if rng.random() < self._copies:
                arrive.append((place + rng.random() * (len(sent) - place), request))
        arrive.sort(key=lambda each: each[0])
        return [request for _, request in arrive]
