"""JSON form of dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.operations.dead_letters import STATES
from outbox.operations.views.merge import merge_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.operations.dead_letters import DeadLetter, DeadLetterCount
    from outbox.operations.replays import ReplayOutcome


def dead_letter(dead_letter: DeadLetter) -> dict[str, Any]:
    """JSON form of one dead letter."""
    return merge_fields(dead_letter.row, dead_letter, without=("row",))


def count_report(counts: Sequence[DeadLetterCount]) -> dict[str, Any]:
    """JSON form of counts: in total, and by endpoint, reason and state."""
    total: dict[str, int] = dict.fromkeys(STATES, 0)
    for each in counts:
        total[each.state] += each.dead_letters
    return {"total": total, "counts": counts}


def replay_plan(verb: str, outcome: ReplayOutcome) -> dict[str, Any]:
    """JSON form of a dry run."""
    result: dict[str, Any] = {"dry_run": True, verb: outcome.done, "skipped": outcome.skipped}
    return result if outcome.by_endpoint is None else result | {"by_endpoint": outcome.by_endpoint}


def replay_result(verb: str, outcome: ReplayOutcome) -> dict[str, Any]:
    """JSON form of a result."""
    result = {verb: outcome.done, "skipped": outcome.skipped}
    return result if outcome.job is None else result | {"job": outcome.job}
