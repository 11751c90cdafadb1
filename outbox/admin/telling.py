"""What a tenant's token is told of what is its own: nothing of who and what is beside it.

Left out, wherever it stands, is

    who runs it       an operator is `operator`, a relay is `relay`; of tokens those of
                      the tenant itself have their names
    how much there is batches, how far the sequencing is, how many events were looked at

Numbers of things (events, dead letters, jobs, rows of the journal) and the cursors made
of them are counted over the whole installation.  They stay: whoever asks needs them to
name a thing, and an X-Delivery has the event's in it anyway.  They tell that something
happened, never what.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outbox.store import tenancy
from outbox.store.resending import is_receiver

if TYPE_CHECKING:
    from collections.abc import Set

    from outbox.admin.routing import Call
    from outbox.core.story import Delivery, Story
    from outbox.store.endpoints import EndpointRow
    from outbox.store.jobs import Job
    from outbox.store.journal import JournalRow
    from outbox.store.schedules import Schedule

NOT_SHOWN = "(not shown)"
OPERATOR, RELAY = "operator", "relay"
INSIDES = frozenset(
    ("epoch", "from_batch", "from_id", "relay", "replica", "timeline", "to_batch", "to_id")
)
"""What the journal has of how the installation works."""
HUNDREDTHS = 100


@dataclass(frozen=True, slots=True)
class Teller:
    """Tells things to a caller.

    Args:
        own: how those who act with the tenant's tokens are called; None: the caller may know
            everything.
    """

    own: Set[str] | None

    def who(self, actor: str | None) -> str | None:
        """Who did something."""
        if self.own is None or actor is None or actor in self.own or is_receiver(actor):
            return actor
        return RELAY if actor.startswith("replica ") else OPERATOR

    def endpoint(self, row: EndpointRow) -> EndpointRow:
        """An endpoint of a listing."""
        return replace(row, state_by=self.who(row.state_by))

    def schedule(self, found: Schedule) -> Schedule:
        """A schedule."""
        return replace(found, state_by=self.who(found.state_by))

    def job(self, job: Job) -> Job:
        """A replay job; of a backfill the share, as its range is one of everybody's events."""
        if self.own is None:
            return job
        told = replace(job, asked_by=self.who(job.asked_by) or OPERATOR)
        if job.kind != "history" or not job.all:
            return told
        return replace(told, done=int(job.share * HUNDREDTHS), all=HUNDREDTHS)

    def journal(self, row: JournalRow) -> JournalRow:
        """Something that happened."""
        if self.own is None:
            return row
        data = {name: value for name, value in row.data.items() if name not in INSIDES}
        return replace(row, actor=self.who(row.actor) or OPERATOR, data=data)

    def story(self, story: Story) -> Story:
        """The life of an event."""
        if self.own is None:
            return story
        sequenced, sequencing = story.sequenced, story.sequencing
        return replace(
            story,
            sequenced=sequenced and replace(sequenced, batch=None),
            sequencing=sequencing
            and replace(sequencing, high=None, in_gap=None, relays=None, leader=None),
            deliveries=tuple(map(self._delivery, story.deliveries)),
        )

    def _delivery(self, told: Delivery) -> Delivery:
        standing = told.standing
        if standing is not None:
            relay = None if standing.relay is None else NOT_SHOWN
            standing = replace(standing, relay=relay, state_by=self.who(standing.state_by))
        attempts = tuple(replace(each, replica_id=None) for each in told.attempts)
        return replace(told, standing=standing, attempts=attempts)


async def teller(call: Call[Any, Any]) -> Teller:
    """What tells things to this caller."""
    if call.tenant is None:
        return Teller(None)
    return Teller(await tenancy.actors(call.db, call.tenant))
