"""The demo's proof: three sets of books that must agree.

The shop knows what it committed, the receivers know what they processed, and
the relay's tables know what was given up.  What was committed and subscribed
to, but neither processed nor given up, is missing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.operations.verify.promises import audit

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.devtools.demo.application import Books
    from outbox.devtools.demo.environment import Destination

GIVEN_UP = """
SELECT e.name, array_agg(d.event_id::text) AS events
  FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id
 GROUP BY e.name
"""


@dataclass(frozen=True, slots=True)
class Proof:
    """The result; what is wrong comes last and should be zero."""

    published: int
    rolled_back: int
    owed: int
    """Deliveries that the committed events make at the endpoints."""
    delivered: int
    duplicates: int
    """Copies that came again and were dropped by their X-Delivery."""
    dead_lettered: int
    out_of_order: int
    missing: int
    phantoms: int
    """Deliveries of events that were rolled back."""
    broken_promises: int
    """Exceptions that `outbox verify` found in the database."""

    @property
    def good(self) -> bool:
        """Whether everything holds."""
        return not (self.out_of_order or self.missing or self.phantoms or self.broken_promises)


async def prove(
    connection: Connection[Any], books: Books, destinations: list[Destination]
) -> Proof:
    """Compare the books."""
    given_up = {r["name"]: set(r["events"]) for r in await connection.fetch(GIVEN_UP)}
    owed = delivered = duplicates = out_of_order = missing = phantoms = dead = 0
    for destination in destinations:
        wanted = {e.id for e in books.committed if destination.wants(e.type)}
        got = {d.event_id for d in destination.processed}
        dead_here = given_up.get(destination.plan.name, set())
        owed += len(wanted)
        delivered += len(got)
        dead += len(dead_here)
        missing += len(wanted - got - dead_here)
        phantoms += len(got - wanted)
        duplicates += destination.receiver.totals().duplicates
        out_of_order += _inversions(destination)
    broken = 0
    async for finding in audit(connection):
        broken += finding.violations
    return Proof(
        published=books.done,
        rolled_back=len(books.rolled_back),
        owed=owed,
        delivered=delivered,
        duplicates=duplicates,
        dead_lettered=dead,
        out_of_order=out_of_order,
        missing=missing,
        phantoms=phantoms,
        broken_promises=broken,
    )


def _inversions(destination: Destination) -> int:
    """First arrivals that came behind a later one, in their lane or of their customer."""
    wrong = 0
    number: dict[str, int] = defaultdict(int)
    version: dict[int, int] = defaultdict(int)
    for delivered in destination.processed:
        if delivered.sequence < number[delivered.lane]:
            wrong += 1
        if delivered.version < version[delivered.customer]:
            wrong += 1
        number[delivered.lane] = max(number[delivered.lane], delivered.sequence)
        version[delivered.customer] = max(version[delivered.customer], delivered.version)
    return wrong
