"""Mistakes with the order of a lane, retries and dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.delivery import lane
from outbox.core.model.response import Verdict
from outbox.relay.delivery import recorder
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


@mutant
def next_number_sent_while_the_head_waits_to_be_retried(sim: Simulation) -> None:
    """Who fails goes to the end of what is in hand."""
    answered = lane.Lane.answered

    def patched(self: Any, verdict: Verdict, *args: Any, **rest: Any) -> Any:
        record = answered(self, verdict, *args, **rest)
        if verdict is Verdict.RETRY and record.dead is None and len(self._hand.queue) > 1:
            queue = self._hand.queue
            queue[0], queue[1] = queue[1], queue[0]
            self._head.next_attempt_at = None
        return record

    swap(lane.Lane, "answered", patched)


@mutant
def retry_state_only_in_memory(sim: Simulation) -> None:
    """A failure is not written down while there will be another attempt."""
    write = recorder.Recorder.write

    async def patched(self: Any, machine: Any, epoch: int, record: Any) -> None:
        if record.dead is None:
            machine.recorded(record)
        else:
            await write(self, machine, epoch, record)

    swap(recorder.Recorder, "write", patched)


@mutant
def a_give_up_that_waits_for_the_next_group(sim: Simulation) -> None:
    """The lane goes on before its dead letter is on disk."""
    write = recorder.Recorder.write

    async def patched(self: Any, machine: Any, epoch: int, record: Any) -> None:
        if record.dead is None:
            await write(self, machine, epoch, record)
        else:
            self._append(recorder.Entry(machine, epoch, record))
            machine._busy = None

    swap(recorder.Recorder, "write", patched)


@mutant
def a_give_up_written_without_the_lanes_waiting_successes(sim: Simulation) -> None:
    """A dead letter goes ahead of the acknowledgements before it."""
    write = recorder.Recorder.write

    async def patched(self: Any, machine: Any, epoch: int, record: Any) -> None:
        if record.dead is None:
            await write(self, machine, epoch, record)
            return
        async with self._writing:
            await self._store.write([record], [epoch])
        machine.recorded(record)

    swap(recorder.Recorder, "write", patched)
