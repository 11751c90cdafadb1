"""What an operator lets the owner of a held lane do about its stream.

A request is valid until the lane delivers again: it names the last delivered sequence, which does
not change while the lane is held.

    refill   append what the stream has lost again, with its own sequences
    adopt    go on with the stream as it is

What adopting does depends on where the lane stands once its fence is written by force:

    held as   stands at                             decision
    fenced    as the database says                  go on
    forgot    below what was delivered              go on there; the loss is accepted
    ahead     above what was assigned               abandon the lane
    foreign   another X-Delivery, or a trimmed one  abandon the lane
    foreign   ids of another writer                 hold: only deleting the stream helps

An abandoned lane belongs to an older generation, because the request begins a new one.  Its pending
deliveries become dead letters, and newer lanes go on.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from outbox.core.brokers.port import Position
from outbox.core.brokers.take_over import Decision, Hold, HoldReason, Proceed

if TYPE_CHECKING:
    from outbox.core.brokers.port import Standing


class RepairKind(StrEnum):
    """What an operator has requested."""

    REFILL = "refill"
    ADOPT = "adopt"


class Repair(NamedTuple):
    """A request for one lane."""

    kind: RepairKind
    delivered_seq: int
    """The last delivered sequence of the lane; with another one the request is stale."""


class Abandon(NamedTuple):
    """Dead-letter what is pending: the stream stands here, and the lane's sequences do not fit."""

    position: int


RepairDecision: TypeAlias = Decision | Abandon
DELETE_STREAM = (
    "; to go on, delete the stream (or the other writer's entries), and then: outbox endpoint adopt"
)


def adopt(decision: RepairDecision, standing: Standing, *, ended: bool) -> RepairDecision:
    """Decide what adopting does with a lane.

    Args:
        decision: the decision without the request.
        standing: the position of the lane that was opened by force.
        ended: the lane belongs to an older generation.
    """
    if not isinstance(decision, Hold):
        return decision
    if not isinstance(standing, Position):
        return Hold(decision.reason, decision.detail + DELETE_STREAM)
    if decision.reason is HoldReason.FORGOT:
        return Proceed(standing.sequence)
    # The new generation is not known yet: the next opening knows it.
    return Abandon(standing.sequence) if ended else decision
