"""Known mistakes, by the part of the relay."""

from tests.sim.mutants import (
    batches,
    cursor,
    feeds,
    lanes,
    limits,
    observed_time,
    operational,
    operators,
    ownership,
    records,
    replays,
    restores,
    retention,
    runs,
    schedules,
    shares,
)
from tests.sim.mutants.catalogue import MUTANTS

__all__ = [
    "MUTANTS",
    "batches",
    "cursor",
    "feeds",
    "lanes",
    "limits",
    "observed_time",
    "operational",
    "operators",
    "ownership",
    "records",
    "replays",
    "restores",
    "retention",
    "runs",
    "schedules",
    "shares",
]
