"""Concurrency limits of the API: requests in progress, and the bytes of their bodies.

A rate limit alone does not bound what is in progress: a client can send its bodies slowly, and a
request can wait for the database.  One token takes a share of the connections and of the memory
only, and so does one address, which may use several tokens.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.web.address import address_key
from outbox.web.serving import CLIENT_CONNECTIONS_MAX
from outbox_api.problem import Refusal
from outbox_api.rate_limit import too_many_requests

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

MIB = 1024 * 1024
SLOT_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Share:
    """What one token or address may have in progress."""

    requests: int
    body_bytes: int


TOKEN = Share(CLIENT_CONNECTIONS_MAX // 8, 2 * MIB)
ADDRESS = Share(CLIENT_CONNECTIONS_MAX // 2, 16 * MIB)
"""Larger than the share of a token: behind a proxy all clients have one address."""


class RequestSlots:
    """Requests in progress of one listener."""

    def __init__(self) -> None:
        self._requests: Counter[Hashable] = Counter()
        self._bytes: Counter[Hashable] = Counter()

    @contextmanager
    def hold(self, token_id: Hashable, address: str, body_bytes: int = 0) -> Iterator[None]:
        """Count a request while the context lasts.

        Args:
            body_bytes: upper bound of its body.

        Raises:
            Problem: the token or the address has too many requests in progress.
        """
        keys = (("token", token_id), ("address", address_key(address)))
        for (what, _), key, share in zip(keys, keys, (TOKEN, ADDRESS), strict=True):
            if self._requests[key] >= share.requests:
                raise _too_many(f"this {what} has {share.requests} requests in progress")
            # One body is always accepted: where large payloads are allowed, it may be larger.
            if body_bytes and self._bytes[key] and self._bytes[key] + body_bytes > share.body_bytes:
                raise _too_many(f"this {what} sends {share.body_bytes // MIB} MiB of bodies")
        for key in keys:
            self._requests[key] += 1
            self._bytes[key] += body_bytes
        try:
            yield
        finally:
            for key in keys:
                for counter, amount in ((self._requests, 1), (self._bytes, body_bytes)):
                    counter[key] -= amount
                    if not counter[key]:
                        del counter[key]


def _too_many(reason: str) -> Exception:
    return too_many_requests(
        f"{reason}; wait for their responses", SLOT_RETRY_S, Refusal.CONCURRENCY
    )
