"""What a token is told: of answers nothing but to operators, and to a tenant nothing of others.

What a receiver answers goes to those who operate the system: who has an endpoint point to
something inside of a network must not be shown what that says.  All others, those with
`read` alone and every tenant's token, are told its status, or how the attempt failed, and
how long it took.

A tenant's token is told nothing of who and what is beside it.

Left out, wherever it stands, is

    who runs it       an operator is `operator`, a relay is `relay`; of tokens those of
                      the tenant itself have their names
    how much there is batches, how far the sequencing is, how many events were looked at
    what is inside    whether a name leads nowhere, or to an address that is refused

Numbers of things (events, dead letters, jobs, rows of the journal) and the cursors made
of them are counted over the whole installation.  They stay: whoever asks needs them to
name a thing, and an X-Delivery has the event's in it anyway.  They tell that something
happened, never what.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outbox.core.model.response import outcome, veiled
from outbox.operations import tenancy
from outbox.operations.receiver_replays import is_receiver

if TYPE_CHECKING:
    from collections.abc import Set

    from outbox.api.route import Call
    from outbox.operations.dead_letters import DeadLetter
    from outbox.operations.endpoints import Detail, EndpointRow
    from outbox.operations.event_trace import Attempt, Delivery, Story
    from outbox.operations.journal import JournalRow
    from outbox.operations.replay_jobs import Job
    from outbox.operations.schedules import Schedule
    from outbox.operations.status import EndpointStatus, Overview

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
            of everybody.
        answers: it may know what receivers say.
    """

    own: Set[str] | None
    answers: bool

    def who(self, actor: str | None) -> str | None:
        """Who did something."""
        if self.own is None or actor is None or actor in self.own or is_receiver(actor):
            return actor
        return RELAY if actor.startswith("replica ") else OPERATOR

    def answer(self, told: dict[str, Any] | None) -> dict[str, Any] | None:
        """What came of an attempt, in a summary of the answer or with it."""
        if self.answers or told is None:
            return told
        summary = outcome(told)
        if self.own is not None and "failure" in summary:
            summary["failure"] = veiled(summary["failure"])
        return summary

    def endpoint(self, row: EndpointRow) -> EndpointRow:
        """An endpoint of a listing."""
        return replace(row, state_by=self.who(row.state_by))

    def detail(self, found: Detail) -> Detail:
        """Everything about an endpoint."""
        health = replace(found.health, last_answer=self.answer(found.health.last_answer))
        lanes = tuple(
            replace(lane, last_answer=self.answer(lane.last_answer)) for lane in found.lanes
        )
        hands = found.hands if self.own is None else ()
        return replace(found, row=self.endpoint(found.row), health=health, lanes=lanes, hands=hands)

    def letter(self, found: DeadLetter) -> DeadLetter:
        """A dead letter."""
        return replace(found, last_answer=self.answer(found.last_answer))

    def overview(self, seen: Overview) -> Overview:
        """One look at everything."""
        return replace(seen, endpoints=tuple(map(self._status, seen.endpoints)))

    def _status(self, row: EndpointStatus) -> EndpointStatus:
        head = row.failing
        if head is None:
            return row
        return replace(row, failing=replace(head, last_answer=self.answer(head.last_answer)))

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
        data = dict(row.data)
        if "last_answer" in data:
            data["last_answer"] = self.answer(data["last_answer"])
        if self.own is None:
            return replace(row, data=data)
        data = {name: value for name, value in data.items() if name not in INSIDES}
        return replace(row, actor=self.who(row.actor) or OPERATOR, session_role=None, data=data)

    def story(self, story: Story) -> Story:
        """The life of an event."""
        if self.own is None:
            return replace(story, deliveries=tuple(map(self._answered, story.deliveries)))
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
        return self._answered(replace(told, standing=standing, attempts=attempts))

    def _answered(self, told: Delivery) -> Delivery:
        if self.answers:
            return told
        standing = told.standing
        if standing is not None:
            head = replace(standing.head, last_answer=self.answer(standing.head.last_answer))
            standing = replace(standing, head=head)
        return replace(told, standing=standing, attempts=tuple(map(self._attempted, told.attempts)))

    def _attempted(self, attempt: Attempt) -> Attempt:
        # What was wrong with an answer may quote it.
        failure = (attempt.answer or {}).get("failure") if attempt.status is None else None
        return replace(attempt, answer=None, error=failure if self.own is None else veiled(failure))


async def teller(call: Call[Any, Any]) -> Teller:
    """What tells things to this caller."""
    if call.tenant is None:
        return Teller(None, answers="operate" in call.caller.scopes)
    return Teller(await tenancy.actors(call.db, call.tenant), answers=False)
