"""Mistakes with several deliveries in one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.delivery import batch, lane
from outbox.core.model.endpoint import BATCH_MAX
from outbox.relay.delivery import dispatcher
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


@mutant
def a_batch_acknowledged_whole_when_a_part_was_accepted(sim: Simulation) -> None:
    """2xx is 2xx, whatever else the receiver says."""

    def patched(*args: Any, **rest: Any) -> Any:
        verdict, through = batch.classify_batch(*args, **rest)
        return verdict, args[0][-1].seq if through >= args[0][0].seq else through

    swap(dispatcher, "classify_batch", patched)


@mutant
def a_batch_called_by_its_first_delivery(sim: Simulation) -> None:
    """The id stays the same while others join or leave."""
    swap(batch, "_batch_id", lambda first, first_id, last, last_id: first_id)


@mutant
def a_failed_batch_sent_together_again(sim: Simulation) -> None:
    """Who is to blame is never found out."""
    together = lane.Lane._together

    def patched(self: Any, *args: Any) -> Any:
        attempts, self._head.attempts = self._head.attempts, 0
        self._batch_size.now = BATCH_MAX
        try:
            return together(self, *args)
        finally:
            self._head.attempts = attempts

    swap(lane.Lane, "_together", patched)


@mutant
def what_a_failed_batch_held_given_up_with_its_first(sim: Simulation) -> None:
    """A success of a part passes all of it."""
    answered = lane.Lane.batch_answered

    def patched(self: Any, sent: Any, accepted_seq: int, *args: Any, **rest: Any) -> Any:
        records = answered(self, sent, accepted_seq, *args, **rest)
        if accepted_seq >= sent[0].seq:
            self._pass(sent[-1].seq, sent[-1].batch, delivered=True)
        return records

    swap(lane.Lane, "batch_answered", patched)
