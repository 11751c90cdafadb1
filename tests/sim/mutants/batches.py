"""Mistakes with several deliveries in one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.delivery import lane
from outbox.core.messages import batch
from outbox.core.model.message_format import BATCH_MAX
from outbox.relay.delivery import settle
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


@mutant
def whole_batch_acknowledged_after_partial_success(sim: Simulation) -> None:
    """A response of 2xx acknowledges all deliveries of the request."""

    def patched(*args: Any, **rest: Any) -> Any:
        outcome, through = batch.classify_batch(*args, **rest)
        return outcome, args[0][-1].seq if through >= args[0][0].seq else through

    swap(settle, "classify_batch", patched)


@mutant
def batch_id_ignores_later_deliveries(sim: Simulation) -> None:
    """The id of a batch does not depend on its other deliveries."""
    swap(batch, "_batch_id", lambda first, first_id, last, last_id: first_id)


@mutant
def failed_batch_not_split(sim: Simulation) -> None:
    """A failed batch is never split."""
    select_batch = lane.Lane._select_batch

    def patched(self: Any, *args: Any) -> Any:
        attempts, self._retry.attempts = self._retry.attempts, 0
        self._batch_size.current = BATCH_MAX
        try:
            return select_batch(self, *args)
        finally:
            self._retry.attempts = attempts

    swap(lane.Lane, "_select_batch", patched)


@mutant
def batch_advanced_past_accepted_part(sim: Simulation) -> None:
    """A success of a part acknowledges the whole batch."""
    record_batch = lane.Lane.record_batch_result

    def patched(self: Any, sent: Any, accepted_seq: int, *args: Any, **rest: Any) -> Any:
        records = record_batch(self, sent, accepted_seq, *args, **rest)
        if accepted_seq >= sent[0].seq:
            busy = self._busy
            self._deliver_through(sent[-1].seq, sent[-1].batch, self._success_at)
            self._busy = busy  # A record that has to be durable first is waited for.
        return records

    swap(lane.Lane, "record_batch_result", patched)
