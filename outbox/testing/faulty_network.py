"""Network fault injection for tests: drops, duplicates and reorders requests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.receiver.requests import Request


class FaultyNetwork:
    """Drops, duplicates and reorders requests, deterministically for a seed.

    Args:
        seed: the seed of the random choices.
        drop_rate: share of requests that never arrive, 0 to 1.
        duplicate_rate: share of requests that arrive twice, the second time at any later
            position, 0 to 1.
        reorder_distance: maximum number of positions by which a request is delayed.

    Raises:
        UsageError: a rate is not in 0 to 1, or `reorder_distance` is negative.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        drop_rate: float = 0.0,
        duplicate_rate: float = 0.0,
        reorder_distance: int = 0,
    ) -> None:
        for name, share in (("drop_rate", drop_rate), ("duplicate_rate", duplicate_rate)):
            if not 0.0 <= share <= 1.0:
                raise UsageError(f"{name}: must be between 0 and 1, not {share:g}")
        if reorder_distance < 0:
            raise UsageError(f"reorder_distance: must be 0 or more, not {reorder_distance}")
        self._rng = random.Random(seed)  # noqa: S311  not used for secrets
        self._drop_rate, self._duplicate_rate = drop_rate, duplicate_rate
        self._reorder_distance = reorder_distance

    def deliver(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that arrive, in order of arrival."""
        rng = self._rng
        sent = list(requests)
        arrive: list[tuple[float, Request]] = []
        for place, request in enumerate(sent):
            if rng.random() < self._drop_rate:
                continue
            arrive.append((place + rng.random() * (self._reorder_distance + 1e-9), request))
            if rng.random() < self._duplicate_rate:
                arrive.append((place + rng.random() * (len(sent) - place), request))
        arrive.sort(key=lambda each: each[0])
        return [request for _, request in arrive]
