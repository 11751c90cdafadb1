"""Wake events: set by a notification, a command or a shutdown, and consumed by one wait.

For the flag by which producers know whether a notification is needed, see
`outbox.relay.sequencing.sequencer`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


class WakeEvent:
    """Wakes the one task that waits for it; stays set until a wait consumes it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake the waiting task, now or at its next wait."""
        self._event.set()

    def clear(self) -> None:
        """Discard a set event that no wait has consumed."""
        self._event.clear()

    async def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; return whether the event was set, and consume it."""
        if self._event.is_set():
            self._event.clear()
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


@dataclass(slots=True)
class Wakeups:
    """The wake events of a session, by the part that waits: made before the parts that set them."""

    published: WakeEvent = field(default_factory=WakeEvent)
    """The sequencer: events may have been published."""
    standby: WakeEvent = field(default_factory=WakeEvent)
    """The sequencer on standby: a replica may have been released or registered."""
    schedules: WakeEvent = field(default_factory=WakeEvent)
    """The schedule runner: an event of a tenant was held."""
    ownership: WakeEvent = field(default_factory=WakeEvent)
    """Ownership: a stopped endpoint became idle, or the batch feed is due earlier."""
    supervisor: WakeEvent = field(default_factory=WakeEvent)
    """The endpoint supervisor: the state of an endpoint changed."""
    _is_cluster_changed: bool = False

    def poll_cluster(self) -> None:
        """Let ownership poll the cluster at once: batches may have been missed."""
        self._is_cluster_changed = True
        self.ownership.set()

    def poll_changes(self) -> None:
        """Let ownership, or a sequencer on standby, poll at once: endpoints were changed."""
        self.poll_cluster()
        self.standby.set()

    def pop_cluster_changed(self) -> bool:
        """Whether ownership is to poll the cluster at once; resets that."""
        changed, self._is_cluster_changed = self._is_cluster_changed, False
        return changed
