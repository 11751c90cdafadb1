"""How long the sequencer waits after each result of a batch."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from outbox.config import Settings
from outbox.relay.sequencing.cursor import BatchResult
from outbox.relay.sequencing.sequencer import BUSY_POLL_S, LOCK_RETRY_S, POLL_MIN_S, Sequencer
from outbox.relay.wake_event import Wakeups
from tests.support.sequencers import always_notify

if TYPE_CHECKING:
    from outbox.store.sequencing.batches import SequencingStore

POLL_S = 2.0


def _sequencer(*, notified: bool = True) -> Sequencer:
    store = SimpleNamespace(feeds=None, filters=None, replay_feed=None, routing=None, stalls=None)
    unused = cast("SequencingStore", store)
    return Sequencer(
        unused, 1, Settings(poll_s=POLL_S), Wakeups(), lambda _: None,
        always_notify, notified=notified,
    )  # fmt: skip


def _waits_s(sequencer: Sequencer) -> dict[str, float | None]:
    return {result.name: sequencer._next_wait_s(result) for result in BatchResult}


async def test_what_was_read_in_part_is_read_on_at_once_unless_the_cursor_row_is_locked() -> None:
    sequencer = _sequencer()
    sequencer.cursor.reader.more = True
    sequencer._asleep_until = math.inf
    assert _waits_s(sequencer) == {
        "WRITTEN": None, "EMPTY": None, "LOCKED": LOCK_RETRY_S, "STALE": None
    }  # fmt: skip


async def test_an_asleep_sequencer_sleeps_unless_nothing_could_be_read() -> None:
    sequencer = _sequencer()
    sequencer._asleep_until = math.inf
    assert _waits_s(sequencer) == {
        "WRITTEN": math.inf, "EMPTY": math.inf, "LOCKED": LOCK_RETRY_S, "STALE": None
    }  # fmt: skip


async def test_an_awake_sequencer_polls_less_often_when_it_is_busy() -> None:
    sequencer = _sequencer()
    idle = {"WRITTEN": POLL_MIN_S, "EMPTY": POLL_MIN_S, "LOCKED": LOCK_RETRY_S, "STALE": None}
    assert _waits_s(sequencer) == idle
    now = asyncio.get_running_loop().time()
    sequencer._sequenced_at.extend([now] * sequencer.busy_events)
    assert _waits_s(sequencer) == {**idle, "WRITTEN": BUSY_POLL_S}


async def test_without_notifications_it_polls_until_a_batch_is_empty() -> None:
    waits_s = _waits_s(_sequencer(notified=False))
    assert math.isclose(cast("float", waits_s.pop("EMPTY")), POLL_S)
    assert waits_s == {"WRITTEN": None, "LOCKED": LOCK_RETRY_S, "STALE": None}
