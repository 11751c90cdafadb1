"""What the listeners of a process share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outbox_api.in_flight import InFlight
from outbox_api.loop_time import LoopTime
from outbox_api.meters import ApiMeters

if TYPE_CHECKING:
    from outbox_api.database import Database


@dataclass(frozen=True, slots=True)
class Shared:
    """The limits and the meters of one process."""

    requests: InFlight = field(default_factory=InFlight)
    loop_time: LoopTime = field(default_factory=LoopTime)
    meters: ApiMeters = field(default_factory=lambda: ApiMeters(time.time()))
    databases: list[Database] = field(default_factory=list)
    """The connections of each listener."""

    @property
    def problem(self) -> str | None:
        """Why requests cannot use the database, in one line; None: they can."""
        return next((each.problem for each in self.databases if each.problem), None)
