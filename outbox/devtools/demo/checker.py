"""Checks of the demo: compares committed events, processed deliveries and dead letters.

An event that was committed and subscribed to, but neither processed nor dead-lettered, is
missing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.operations.verify.audit import run_checks

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.devtools.demo.application import ShopLedger
    from outbox.devtools.demo.environment import Destination

DEAD_LETTERED = """
SELECT e.name, array_agg(d.event_id::text) AS events
  FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id
 GROUP BY e.name
"""


@dataclass(frozen=True, slots=True)
class DemoChecks:
    """Counts of the demo; those of violations come last and should be zero."""

    published: int
    rolled_back: int
    expected: int
    """Deliveries to make for the committed events."""
    delivered: int
    duplicates: int
    """Copies dropped by their X-Delivery."""
    dead_lettered: int
    out_of_order: int
    missing: int
    phantoms: int
    """Deliveries of rolled-back events."""
    violations: int
    """Violations found by `outbox verify` in the database."""

    @property
    def good(self) -> bool:
        """Every guarantee held."""
        return not (self.out_of_order or self.missing or self.phantoms or self.violations)


async def check_demo(
    connection: Connection[Any], ledger: ShopLedger, destinations: list[Destination]
) -> DemoChecks:
    """Compare the shop, the receivers and the database."""
    dead_lettered = {r["name"]: set(r["events"]) for r in await connection.fetch(DEAD_LETTERED)}
    expected = delivered = duplicates = out_of_order = missing = phantoms = dead = 0
    for destination in destinations:
        subscribed = {e.id for e in ledger.committed if destination.subscribes_to(e.type)}
        got = {d.event_id for d in destination.processed}
        dead_here = dead_lettered.get(destination.plan.name, set())
        expected += len(subscribed)
        delivered += len(got)
        dead += len(dead_here)
        missing += len(subscribed - got - dead_here)
        phantoms += len(got - subscribed)
        duplicates += destination.receiver.totals().duplicates
        out_of_order += _inversions(destination)
    broken = 0
    async for finding in run_checks(connection):
        broken += finding.violations
    return DemoChecks(
        published=ledger.done,
        rolled_back=len(ledger.rolled_back),
        expected=expected,
        delivered=delivered,
        duplicates=duplicates,
        dead_lettered=dead,
        out_of_order=out_of_order,
        missing=missing,
        phantoms=phantoms,
        violations=broken,
    )


def _inversions(destination: Destination) -> int:
    """Count first arrivals after a later one of the same lane or customer."""
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
