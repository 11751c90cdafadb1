"""Which answers are worth another try: an endpoint's own list of statuses.

An item is one status (`429`), a class (`5xx`) or a range (`500-504`).  A 2xx is
a success and 410 says that the endpoint is gone; neither can ever be retried, so
a list that names them is a mistake.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFLICT = 409
GONE = 410

_ITEM = re.compile(r"([1-5])xx|([1-5][0-9]{2})(?:-([1-5][0-9]{2}))?", re.ASCII | re.IGNORECASE)


def parse(texts: Sequence[str]) -> frozenset[int]:
    """The statuses that a list means; an empty list means that none is retried.

    Raises:
        UsageError: an item is not a status, class or range, or names one that
            is never retried.
    """
    statuses: set[int] = set()
    for text in texts:
        chosen = _range(text)
        if any(200 <= status <= 299 for status in chosen):
            raise UsageError(f"retryable: {text!r} has a 2xx in it, which is a success")
        if GONE in chosen and len(chosen) == 1:
            raise UsageError(f"retryable: {GONE} says that the endpoint is gone; it disables it")
        statuses.update(chosen)
    # A range such as 4xx leaves it out without a word.
    return frozenset(statuses - {GONE})


def _range(text: str) -> range:
    match = _ITEM.fullmatch(text)
    if not match:
        raise UsageError(
            f"retryable: {text[:40]!r} is not a status: use one such as 429, a class such as 5xx, "
            "or a range such as 500-504"
        )
    family, first, last = match.groups()
    if family:
        return range(int(family) * 100, int(family) * 100 + 100)
    if last and int(last) < int(first):
        raise UsageError(f"retryable: {text!r} ends before it begins")
    return range(int(first), int(last or first) + 1)
