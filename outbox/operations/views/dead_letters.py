"""How dead letters are told to programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.operations.dead_letters import STATES
from outbox.operations.views.merge import flat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.operations.dead_letters import Count, DeadLetter
    from outbox.operations.replays import Outcome


def letter(found: DeadLetter) -> dict[str, Any]:
    """Everything about one."""
    return flat(found.row, found, without=("row",))


def counts(found: Sequence[Count]) -> dict[str, Any]:
    """How many there are, in all and by endpoint, reason and state."""
    total: dict[str, int] = dict.fromkeys(STATES, 0)
    for each in found:
        total[each.state] += each.letters
    return {"total": total, "counts": found}


def planned(verb: str, outcome: Outcome) -> dict[str, Any]:
    """What would be done with some."""
    told: dict[str, Any] = {"dry_run": True, verb: outcome.done, "skipped": outcome.skipped}
    return told if outcome.by_endpoint is None else told | {"by_endpoint": outcome.by_endpoint}


def done(verb: str, outcome: Outcome) -> dict[str, Any]:
    """What was done with some."""
    told = {verb: outcome.done, "skipped": outcome.skipped}
    return told if outcome.job is None else told | {"job": outcome.job}
