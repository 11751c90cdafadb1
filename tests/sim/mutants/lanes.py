"""Mistakes with the order of a lane, retries and dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.delivery import lane
from outbox.core.model.response_policy import AttemptOutcome
from outbox.relay.delivery import recorder
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


@mutant
def next_delivery_sent_before_retry(sim: Simulation) -> None:
    """A delivery that fails changes places with the next one."""
    original = lane.Lane.record_result

    def patched(self: Any, outcome: AttemptOutcome, *args: Any, **rest: Any) -> Any:
        record = original(self, outcome, *args, **rest)
        if outcome is AttemptOutcome.RETRY and record.dead is None and len(self._buffer.queue) > 1:
            queue = self._buffer.queue
            queue[0], queue[1] = queue[1], queue[0]
            self._retry.next_attempt_at = None
        return record

    swap(lane.Lane, "record_result", patched)


@mutant
def retry_state_only_in_memory(sim: Simulation) -> None:
    """A failure is not written if there will be another attempt."""
    write = recorder.Recorder.write

    async def patched(self: Any, lane_state: Any, epoch: int, record: Any) -> Any:
        if record.dead is None:
            lane_state.confirm_recorded(record)
        else:
            await write(self, lane_state, epoch, record)
        return record

    swap(recorder.Recorder, "write", patched)


@mutant
def dead_letter_waits_for_next_group(sim: Simulation) -> None:
    """The lane continues before its dead letter is durable."""
    write = recorder.Recorder.write

    async def patched(self: Any, lane_state: Any, epoch: int, record: Any) -> Any:
        if record.dead is None:
            await write(self, lane_state, epoch, record)
        else:
            self.add(lane_state, epoch, record)
            lane_state._busy = None
        return record

    swap(recorder.Recorder, "write", patched)


@mutant
def dead_letter_written_before_acknowledgements(sim: Simulation) -> None:
    """A dead letter is written before the acknowledgements that precede it."""
    write = recorder.Recorder.write

    async def patched(self: Any, lane_state: Any, epoch: int, record: Any) -> Any:
        if record.dead is None:
            return await write(self, lane_state, epoch, record)
        async with self._writing:
            await self._store.write([record], [epoch])
        lane_state.confirm_recorded(record)
        return record

    swap(recorder.Recorder, "write", patched)
