"""Mistakes with the odometer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.cluster.observed_time import OdometerAdder
from tests.sim.mutants.catalogue import mutant, swap
from tests.sim.stores import replicas

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


@mutant
def new_adder_counts_from_its_last_renewal(sim: Simulation) -> None:
    """A replica that becomes the adder counts from its last renewal instead of the response."""
    last: dict[int, tuple[OdometerAdder, float]] = {}

    def renewed(self: OdometerAdder, started_at: float, responded_at: float, *, adds: bool) -> None:
        before = last.get(id(self), (self, responded_at))[1]
        last[id(self)] = (self, started_at)
        counts = self._counted_until is not None
        self._counted_until = (started_at if counts else before) if adds else None

    swap(OdometerAdder, "renewed", renewed)


@mutant
def every_replica_adds(sim: Simulation) -> None:
    """The odometer does not name its adder."""
    swap(replicas, "may_add", lambda db, tx, me, observed_s: True)
