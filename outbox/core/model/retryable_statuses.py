"""HTTP statuses after which a delivery is retried: the list that an endpoint can set.

An item is a status (`429`), a class (`5xx`) or a range (`500-504`).  A 2xx is a success and 410
disables the endpoint.  Neither is ever retried, so a list with them is rejected.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING

from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_ITEM = re.compile(r"([1-5])xx|([1-5][0-9]{2})(?:-([1-5][0-9]{2}))?", re.ASCII | re.IGNORECASE)


def parse(texts: Sequence[str]) -> frozenset[int]:
    """Parse a list of statuses; an empty list means that none is retried.

    Raises:
        UsageError: an item is not a status, class or range, or has a status that is never
            retried.
    """
    statuses: set[int] = set()
    for text in texts:
        chosen = _range(text)
        if any(200 <= status <= 299 for status in chosen):
            raise UsageError(f"retryable: {text!r} contains a 2xx, which is a success")
        if HTTPStatus.GONE in chosen and len(chosen) == 1:
            raise UsageError("retryable: 410 is never retried; it disables the endpoint")
        statuses.update(chosen)
    # A class or range such as 4xx silently omits 410.
    return frozenset(statuses - {HTTPStatus.GONE})


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
        raise UsageError(f"retryable: {text!r} ends before it starts")
    return range(int(first), int(last or first) + 1)
