"""Delivery to a broker's streams: positions, lost responses, held lanes and refills."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.brokers.message import end_id
from outbox.core.brokers.port import Appended, Capabilities, Fenced, Position, Stop, StopKind
from outbox.destinations.brokers import Brokers
from outbox.errors import Conflict, UsageError
from outbox.network.egress import EgressPolicy
from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox.operations.dead_letters.replay import start_replay
from outbox.operations.dead_letters.skip import skip_delivery
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.endpoints.repair import request_adoption, request_refill
from outbox.relay.delivery import stream_refill
from tests.support.ranges import next_pending
from tests.support.relay import (
    QUICK_RETRY,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    killed_at_the_end,
    publish,
    remove_events,
    running,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox.core.brokers.port import Message, Owner, Standing
    from outbox.destinations.broker import BrokerAddress, BrokerFinding
    from outbox.operations.endpoints.repair import RequestedRepair
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "redis://broker.example/events"
AWAY = Stop(StopKind.UNAVAILABLE, "LOADING the dataset is in memory")
NO_STREAM = Stop(StopKind.MISCONFIGURED, "no stream")
LOST = Stop(StopKind.UNKNOWN, "the connection was closed")


class Streams:
    """The streams of a broker in memory, and what happens to the next calls."""

    def __init__(self) -> None:
        self.streams: dict[str, list[Message]] = {}
        self.fences: dict[str, int] = {}
        self.opened = 0
        self.connections = 0
        self.calls: list[tuple[MemoryBroker, str]] = []
        self.appends: list[int] = []
        self.log: list[tuple[str, Message]] = []
        """Every message with its lane, in the order of their appends."""
        self.stop: Stop | None = None
        """Every call ends with this, and does nothing."""
        self.lost_responses = 0
        """So many appends store their messages and lose the response."""
        self.closes = False
        """The connection is closed at each append, and nothing is stored."""
        self.refuses: Callable[[Message], bool] = lambda _: False
        self.gate: asyncio.Event | None = None
        """Appends wait for it after they have stored their messages."""

    def connect(self, _: BrokerAddress) -> MemoryBroker:
        self.connections += 1
        return MemoryBroker(self)

    def sequences(self) -> list[int]:
        """The sequences of the only stream."""
        (stream,) = self.streams.values() if self.streams else ([],)
        return [message.sequence for message in stream]


class MemoryBroker:
    capabilities = Capabilities(compare=True, prefix=True, fence=True, position=True)
    is_closed = False

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    async def open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool = False
    ) -> Standing:
        streams = self._streams
        streams.calls.append((self, "open"))
        streams.opened += 1
        if streams.stop is not None:
            return streams.stop
        if not force and (fence := streams.fences.get(lane, 0)) > owner.epoch:
            return Fenced(fence)
        streams.fences[lane] = owner.epoch
        stream = streams.streams.get(lane)
        return Position(stream[-1].sequence, stream[-1].delivery) if stream else Position(0, None)

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        streams = self._streams
        streams.calls.append((self, "append"))
        if streams.stop is not None:
            return Appended(after, streams.stop)
        if streams.closes:
            return Appended(after, Stop(StopKind.CLOSED, "the connection was closed"))
        stream = streams.streams.setdefault(lane, [])
        last = stream[-1].sequence if stream else 0
        if last != after or streams.fences.get(lane, 0) != owner.epoch:
            return Appended(after, Stop(StopKind.MOVED, f"the stream stands at {last}"))
        if any(map(streams.refuses, messages)):
            return Appended(after, Stop(StopKind.REFUSED, "too large"))
        stream += messages
        streams.appends.append(len(messages))
        streams.log += [(lane, message) for message in messages]
        if streams.gate is not None:
            await streams.gate.wait()
        if streams.lost_responses:
            streams.lost_responses -= 1
            return Appended(after, LOST)
        return Appended(messages[-1].sequence, None, f"receipt {messages[-1].sequence}")

    async def check(self, lanes: Sequence[str]) -> list[BrokerFinding]:
        return []

    async def aclose(self) -> None:
        self.is_closed = True


@pytest.fixture
def streams() -> Streams:
    return Streams()


async def stream_endpoint(database: Database, **settings: Any) -> None:
    await add_endpoint(
        database, url=URL, lanes=1, retry={**QUICK_RETRY, "attempts_max": 2}, **settings
    )


def last_failure(database: Database) -> Any:
    return fetchval(
        database, "SELECT max(last_response ->> 'failure') FROM lane_progress WHERE attempts > 0"
    )


async def test_deliveries_are_appended_in_order_with_their_metadata(
    database: Database, streams: Streams
) -> None:
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, *range(1, 21))
        await all_ended(database)
    assert streams.sequences() == list(range(1, 21))
    (stream,) = streams.streams.values()
    headers = dict(stream[4].headers)
    assert headers["X-Sequence"] == "5"
    assert headers["X-Previous-Sequence"] == "4"
    assert headers["X-Delivery"] == stream[4].delivery
    assert "webhook-id" not in headers
    assert b'"data":5' in stream[4].body
    assert await exceptions(database) == {}
    assert await fetchval(database, "SELECT receipt FROM lane_receipt") == "receipt 20"


@pytest.mark.full
async def test_what_waits_goes_in_one_append(database: Database, streams: Streams) -> None:
    await stream_endpoint(database)
    await publish(database, *range(300))
    async with running(database, Network(), brokers=streams.connect):
        await all_ended(database)
    assert streams.sequences() == list(range(1, 301))
    assert max(streams.appends) > 100


async def test_a_lost_response_is_settled_by_the_position(
    database: Database, streams: Streams
) -> None:
    """Nothing is sent again, and each number is acknowledged once."""
    await stream_endpoint(database)
    streams.lost_responses = 3
    async with running(database, Network(), brokers=streams.connect):
        for n in range(1, 11):
            await publish(database, n)
        await all_ended(database)
    assert streams.sequences() == list(range(1, 11))
    found = "SELECT count(*) FROM attempt WHERE error LIKE 'found in the stream%'"
    assert await fetchval(database, found) >= 1
    assert await exceptions(database) == {}


async def test_what_a_dead_relay_appended_is_acknowledged_by_the_next(
    database: Database, streams: Streams
) -> None:
    await stream_endpoint(database)
    streams.gate = asyncio.Event()
    async with killed_at_the_end(database, Network(), brokers=streams.connect):
        await publish(database, 1, 2, 3)
        await until(lambda: streams.appends, what="an append")
    assert await fetchval(database, "SELECT count(*) FROM attempt") == 0
    streams.gate = None
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 4)
        await all_ended(database)
    assert streams.sequences() == [1, 2, 3, 4]
    assert await exceptions(database) == {}


async def test_a_broker_that_is_away_costs_no_delivery(
    database: Database, streams: Streams
) -> None:
    """The retry policy has two attempts."""
    await stream_endpoint(database)
    streams.stop = AWAY
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, *range(1, 6))
        await until(lambda: streams.opened > 8, what="some attempts")
        streams.stop = None
        await all_ended(database)
    assert streams.sequences() == [1, 2, 3, 4, 5]
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0


async def test_a_server_that_closes_again_is_asked_after_a_pause(
    database: Database, streams: Streams
) -> None:
    """The first close is that of an idle connection; what follows is a failure like others."""
    await stream_endpoint(database)
    streams.closes = True
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1)
        await until(lambda: last_failure(database), what="the failure")
        assert await last_failure(database) == "unknown"
        streams.closes = False
        await all_ended(database)
    assert streams.sequences() == [1]


async def test_a_missing_stream_makes_no_dead_letters(database: Database, streams: Streams) -> None:
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1)
        await all_ended(database)
        streams.stop = NO_STREAM
        await publish(database, *range(2, 500))
        await until(lambda: last_failure(database), what="the failure")
        held = "SELECT state FROM endpoint_health WHERE state = 'failing'"
        await until(lambda: fetchval(database, held), what="the open circuit breaker")
        streams.stop = None
        await all_ended(database)
    assert streams.sequences() == list(range(1, 500))
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0


async def test_a_refused_message_is_a_dead_letter_and_the_others_go_on(
    database: Database, streams: Streams
) -> None:
    await stream_endpoint(database)
    streams.refuses = lambda message: b'"data":4' in message.body
    await publish(database, *range(1, 8))
    async with running(database, Network(), brokers=streams.connect):
        await all_ended(database)
    assert streams.sequences() == [1, 2, 3, 5, 6, 7]
    (stream,) = streams.streams.values()
    assert dict(stream[3].headers)["X-Previous-Sequence"] == "3"
    letter = "SELECT reason || ': ' || (last_response ->> 'detail') FROM dead_letter"
    assert await fetchval(database, letter) == "refused: too large"


async def test_a_dead_letter_at_the_end_is_no_loss_of_the_stream(
    database: Database, streams: Streams
) -> None:
    """The next owner finds the stream below the last acknowledged sequence."""
    await stream_endpoint(database)
    streams.refuses = lambda message: b'"data":2' in message.body
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1, 2)
        await all_ended(database)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 3)
        await all_ended(database)
    assert streams.sequences() == [1, 3]


async def test_nothing_is_dead_lettered_while_an_response_is_missing(
    database: Database, streams: Streams
) -> None:
    """The skipped delivery is in the stream after all."""
    await stream_endpoint(database)
    streams.lost_responses = 1
    streams.gate = asyncio.Event()
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1)
        await until(lambda: streams.appends, what="the append")
        streams.stop = AWAY
        streams.gate.set()
        await until(lambda: last_failure(database), what="the failure")
        lane, sequence = await next_pending(database, "shop")
        async with database.at_hand() as db:
            await skip_delivery(db, "relay", "shop", lane, sequence, actor="test", wait_s=0.0)
        opened = streams.opened
        await until(lambda: streams.opened > opened + 1, what="more attempts")
        assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
        streams.stop = None
        await all_ended(database)
    assert streams.sequences() == [1]
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0


async def forgetful(database: Database, streams: Streams, through: int) -> None:
    """Deliver ten events, lose those after `through` in the stream, and publish another one."""
    await publish(database, *range(1, 11))
    await all_ended(database)
    (stream,) = streams.streams.values()
    del stream[through:]
    await publish(database, 11)
    await until(lambda: last_failure(database), what="the failure")


@pytest.mark.parametrize("through", sampled([0, 6]))
async def test_a_stream_that_lost_messages_is_held_until_it_is_refilled(
    database: Database, streams: Streams, through: int
) -> None:
    await stream_endpoint(database)
    await add_endpoint(database, "watch", types=["outbox.lane.stuck"])
    streams.refuses = lambda message: message.body.endswith(b'"data":9}')
    async with running(database, Network(), brokers=streams.connect):
        await forgetful(database, streams, through)
        assert await last_failure(database) == "forgot"
        assert streams.sequences() == list(range(1, through + 1))
        stuck = "SELECT count(*) FROM outbox WHERE type = 'outbox.lane.stuck'"
        assert await fetchval(database, stuck) == 1
        async with database.at_hand() as db:
            done = await request_refill(db, "relay", "shop", actor="test", comment="restored")
        assert [each.to_sequence for each in done.lanes] == [10]
        await all_ended(database)
    assert streams.sequences() == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11]
    (stream,) = streams.streams.values()
    previous = [int(dict(each.headers)["X-Previous-Sequence"]) for each in stream]
    assert previous == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]
    journalled = "SELECT data ->> 'comment' FROM journal WHERE kind = 'refill_requested'"
    assert await fetchval(database, journalled) == "restored"
    assert await exceptions(database) == {}


@pytest.mark.parametrize("through", sampled([0, 6]))
async def test_a_stream_that_lost_messages_is_refilled_without_a_person(
    database: Database, streams: Streams, through: int
) -> None:
    """If its endpoint says so: with the same sequences, and once in a while only."""
    await stream_endpoint(database, on_forgotten="refill")
    streams.refuses = lambda message: message.body.endswith(b'"data":9}')
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, *range(1, 11))
        await all_ended(database)
        (stream,) = streams.streams.values()
        del stream[through:]
        await publish(database, 11)
        await all_ended(database)
        complete = [1, 2, 3, 4, 5, 6, 7, 8, 10, 11]
        assert streams.sequences() == complete
        journalled = "SELECT count(*) FROM journal WHERE kind = 'stream_refilled'"
        assert await fetchval(database, journalled) == 1
        assert await exceptions(database) == {}
        # A broker that forgets again at once needs a person.
        del stream[through:]
        await publish(database, 12)
        await until(lambda: last_failure(database), what="the failure")
        assert await last_failure(database) == "forgot"
        assert streams.sequences() == complete[:through]


async def test_a_refill_without_a_person_goes_on_after_an_interruption(
    database: Database, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not held as if the broker had forgotten again."""
    monkeypatch.setattr(stream_refill, "APPEND_MAX", 2)
    await stream_endpoint(database, on_forgotten="refill")
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, *range(1, 11))
        await all_ended(database)
        (stream,) = streams.streams.values()
        del stream[4:]
        streams.lost_responses = 1
        await publish(database, 11)
        await all_ended(database)
    assert streams.lost_responses == 0
    assert streams.sequences() == list(range(1, 12))


async def test_a_stream_is_not_refilled_without_a_person_unless_all_is_kept(
    database: Database, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the part that is."""
    monkeypatch.setattr(stream_refill, "APPEND_MAX", 2)
    await stream_endpoint(database, on_forgotten="refill")
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, *range(1, 11))
        await all_ended(database)
        await remove_events(database, "id IN (SELECT outbox_id FROM delivery WHERE seq = 9)")
        (stream,) = streams.streams.values()
        del stream[6:]
        await publish(database, 11)
        await until(lambda: last_failure(database), what="the failure")
        assert await last_failure(database) == "forgot"
    assert streams.sequences() == [1, 2, 3, 4, 5, 6]


async def test_a_refill_has_what_a_trigger_kept_out_of_the_attempt_log(
    database: Database, streams: Streams
) -> None:
    """Also where the success was found in the stream, because its response was lost."""
    await stream_endpoint(database, on_forgotten="refill")
    async with database.at_hand() as db:
        await db.execute("""
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
                'BEGIN
                    IF int8range(NEW.seq, NEW.seq + NEW.count) @> 3::bigint THEN
                        RAISE EXCEPTION ''no'';
                    END IF;
                    RETURN NULL;
                 END';
            CREATE TRIGGER refuse BEFORE INSERT ON attempt_run FOR EACH ROW
                WHEN (int8range(NEW.seq, NEW.seq + NEW.count) && '{[3,3],[11,11]}'::int8multirange)
                EXECUTE FUNCTION refuse()
        """)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, *range(1, 11))
        acked = "SELECT min(acked_seq) = {} FROM lane_progress"
        await until(lambda: fetchval(database, acked.format(10)), what="the deliveries")
        streams.lost_responses = 1
        await publish(database, 11)
        await until(lambda: fetchval(database, acked.format(11)), what="the one that was found")
        (stream,) = streams.streams.values()
        del stream[2:]
        await publish(database, 12)
        await until(lambda: fetchval(database, acked.format(12)), what="the next one")
    assert streams.sequences() == list(range(1, 13))
    assert await exceptions(database) == {}


async def test_another_writers_stream_is_not_refilled(database: Database, streams: Streams) -> None:
    """It stands below what was delivered, too, but at a message of another database."""
    await stream_endpoint(database, on_forgotten="refill")
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, *range(1, 11))
        await all_ended(database)
        (stream,) = streams.streams.values()
        del stream[6:]
        stream[5] = stream[5]._replace(delivery="another")
        await publish(database, 11)
        await until(lambda: last_failure(database), what="the failure")
        assert await last_failure(database) == "foreign"
    assert streams.sequences() == [1, 2, 3, 4, 5, 6]


async def test_a_stream_is_not_filled_again_around_events_that_retention_has_removed(
    database: Database, streams: Streams
) -> None:
    """Their sequences would be missing for ever."""
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await forgetful(database, streams, 6)
        await remove_events(database, "id IN (SELECT outbox_id FROM delivery WHERE seq = 8)")
        async with database.at_hand() as db:
            await request_refill(db, "relay", "shop", actor="test")
        detail = "SELECT max(last_response ->> 'detail') FROM lane_progress"
        gone = f"SELECT ({detail}) LIKE '%sequences 7 to 10, not all are kept any more'"
        await until(lambda: fetchval(database, gone), what="the reason")
    assert streams.sequences() == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
async def test_a_message_that_is_refused_when_a_stream_is_filled_again_holds_its_lane_alone(
    database: Database, streams: Streams
) -> None:
    """The broker's limit was lowered since it was delivered."""
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await forgetful(database, streams, 6)
        streams.refuses = lambda message: message.sequence == 7
        async with database.at_hand() as db:
            await request_refill(db, "relay", "shop", actor="test")
        detail = "SELECT max(last_response ->> 'detail') FROM lane_progress"
        refused = f"SELECT ({detail}) LIKE '%sequence 7 is refused: too large'"
        await until(lambda: fetchval(database, refused), what="the reason")
        opened = streams.opened
        await until(lambda: streams.opened > opened + 10, what="more attempts")
        assert await last_failure(database) == "forgot"
        assert await fetchval(database, "SELECT state FROM endpoint_health") == "healthy"
        streams.refuses = lambda _: False
        await all_ended(database)
    assert streams.sequences() == list(range(1, 12))


@pytest.mark.full
async def test_a_held_lane_is_not_opened_all_the_time_after_a_resume(
    database: Database, streams: Streams
) -> None:
    """The circuit breaker of a resumed endpoint admits one probe after the other."""
    retry = {"base_s": 600, "cap_s": 600, "jitter": "proportional"}
    await add_endpoint(database, url=URL, lanes=1, retry=retry)
    async with running(database, Network(), brokers=streams.connect):
        await forgetful(database, streams, 6)
        opened = streams.opened
        async with database.at_hand() as db:
            await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="test")
            await endpoint_states.resume_endpoints(db, "relay", ["shop"], actor="test")
        await until(lambda: streams.opened > opened, what="the opening after the resume")
        await publish(database, *range(20))
    assert streams.opened <= opened + 2


async def change_settings(database: Database, **changed: Any) -> None:
    async with database.at_hand() as db:
        await endpoint_changes.update_endpoint(
            db, "relay", "shop", lambda old: replace(old, **changed), actor="test"
        )


async def adopt(database: Database, *, dry_run: bool = False) -> RequestedRepair:
    async with database.at_hand() as db:
        return await request_adoption(db, "relay", "shop", actor="test", dry_run=dry_run)


REQUESTED = "SELECT count(*) FROM lane WHERE repair IS NOT NULL"


@pytest.mark.full
async def test_new_credentials_during_a_refill_open_the_lane_again(
    database: Database, streams: Streams
) -> None:
    """The position that the refill has reached may be that of another server."""
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await forgetful(database, streams, 6)
        streams.gate = asyncio.Event()
        appends = len(streams.appends)
        async with database.at_hand() as db:
            await request_refill(db, "relay", "shop", actor="test")
        await until(lambda: len(streams.appends) > appends, what="the refill")
        before, calls = streams.calls[-1][0], len(streams.calls)
        await change_settings(database, headers={"Authorization": "Bearer x"})
        changed = "SELECT count(*) = 1 FROM journal WHERE kind = 'endpoint_updated'"
        await until(lambda: fetchval(database, changed), what="the change")
        await until(lambda: before.is_closed, what="the new broker")
        streams.gate.set()
        await all_ended(database)
    after = streams.calls[calls:]
    assert next(call for broker, call in after if broker is not before) == "open"
    assert streams.sequences() == list(range(1, 12))


@pytest.mark.full
async def test_a_held_lane_is_opened_for_a_request_and_not_for_any_change_of_settings(
    database: Database, streams: Streams
) -> None:
    retry = {"base_s": 600, "cap_s": 600, "jitter": "proportional"}
    await add_endpoint(database, url=URL, lanes=1, retry=retry)
    async with running(database, Network(), brokers=streams.connect):
        await forgetful(database, streams, 6)
        opened = streams.opened
        for rate in (100, 200, 300):
            await change_settings(database, rate_per_s=rate)
        await adopt(database)
        await all_ended(database)
    assert streams.opened == opened + 1


async def test_a_lane_goes_on_without_what_its_stream_has_lost(
    database: Database, streams: Streams
) -> None:
    """A reader that has the message before the loss learns of it, and any other does not."""
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await forgetful(database, streams, 6)
        planned = await adopt(database, dry_run=True)
        assert [(each.held, each.action) for each in planned.lanes] == [("forgot", "continue")]
        assert await fetchval(database, REQUESTED) == 0
        done = await adopt(database)
        assert not done.new_lanes
        assert [each.dead_letters_max for each in done.lanes] == [0]
        await all_ended(database)
        await until(lambda: fetchval(database, f"SELECT ({REQUESTED}) = 0"), what="the end")
        (stream,) = streams.streams.values()
        assert streams.sequences() == [1, 2, 3, 4, 5, 6, 11]
        assert dict(stream[-1].headers)["X-Previous-Sequence"] == "10"
        # It was a request for this loss, and not for the next one.
        del stream[3:]
        await publish(database, 12)
        held = "SELECT retry_seq = 12 AND last_response ->> 'failure' = 'forgot' FROM lane_progress"
        await until(lambda: fetchval(database, held), what="the next loss")
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0


async def test_a_lane_with_a_later_owner_in_its_stream_is_taken_over(
    database: Database, streams: Streams
) -> None:
    """As after a restore of the database."""
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1)
        await all_ended(database)
        (lane,) = streams.fences
        streams.fences[lane] = 1_000_000
        await publish(database, 2)
        await until(lambda: last_failure(database), what="the failure")
        assert await last_failure(database) == "fenced"
        done = await adopt(database)
        assert done.new_lanes
        assert [each.action for each in done.lanes] == ["take_over"]
        await publish(database, 3)
        await all_ended(database)
    assert [each.sequence for each in streams.streams[lane]] == [1, 2, 3]
    assert streams.streams[lane][-1].delivery == end_id(lane)
    (newer,) = (name for name in streams.streams if name != lane)
    assert [each.sequence for each in streams.streams[newer]] == [1]
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0


@pytest.mark.parametrize("sequence", sampled([2, 99]))
async def test_a_lane_that_does_not_fit_into_its_stream_is_abandoned(
    database: Database, streams: Streams, sequence: int
) -> None:
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1)
        await all_ended(database)
        ((lane, stream),) = streams.streams.items()
        stream.append(stream[-1]._replace(sequence=sequence, delivery="of another event"))
        await publish(database, 2, 3)
        await until(lambda: last_failure(database), what="the failure")
        assert await last_failure(database) == ("foreign" if sequence == 2 else "ahead")
        planned = await adopt(database, dry_run=True)
        assert planned.dry_run
        assert [each.dead_letters_max for each in planned.lanes] == [2]
        await adopt(database)
        letters = "SELECT sum(to_seq - seq + 1)::int FROM dead_letter WHERE reason = 'adopted'"
        await until(lambda: fetchval(database, letters), what="the dead letters")
        await publish(database, 4)
        await all_ended(database)
    assert await fetchval(database, letters) == 2
    end = stream.pop()
    assert (end.sequence, end.delivery) == (max(sequence, 3) + 1, end_id(lane))
    assert [each.sequence for each in stream] == [1, sequence]
    (newer,) = (name for name in streams.streams if name != lane)
    assert b'"data":4' in streams.streams[newer][0].body
    async with running(database, Network(), brokers=streams.connect):
        async with database.at_hand() as db:
            chosen = DeadLetterSelection(criteria=Criteria("shop"))
            await start_replay(db, "relay", chosen, actor="test")
        await until(lambda: len(streams.streams[newer]) == 3, what="the replay")
    abandoned = "SELECT count(*) FROM journal WHERE kind = 'lane_abandoned'"
    assert await fetchval(database, abandoned) == 1


async def test_only_held_lanes_are_adopted(database: Database, streams: Streams) -> None:
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1)
        await all_ended(database)
        with pytest.raises(Conflict, match=r"no lane of endpoint .shop. is held"):
            await adopt(database)


async def test_there_is_no_refill_without_a_loss(database: Database, streams: Streams) -> None:
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1)
        await all_ended(database)
        with pytest.raises(Conflict, match=r"no stream of endpoint .shop. has lost messages"):
            async with database.at_hand() as db:
                await request_refill(db, "relay", "shop", actor="test")


@pytest.mark.full
async def test_a_held_lane_does_not_hold_the_others(database: Database, streams: Streams) -> None:
    await add_endpoint(database, url=URL, lanes=4, retry=QUICK_RETRY)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, *range(1, 41))
        await all_ended(database)
        lost = next(iter(streams.streams))
        streams.streams[lost].clear()
        await publish(database, *range(41, 81))
        await until(lambda: last_failure(database), what="the failure")
        pending = (
            "SELECT count(*) FROM lane_progress p JOIN lane_counter c USING (lane_id) "
            "WHERE c.last_seq > p.acked_seq"
        )
        await until(lambda: fetchval(database, f"SELECT ({pending}) = 1"), what="the others")
        assert await fetchval(database, "SELECT state FROM endpoint_health") == "healthy"
        async with database.at_hand() as db:
            await request_refill(db, "relay", "shop", actor="test")
        await all_ended(database)
    for stream in streams.streams.values():
        assert [each.sequence for each in stream] == list(range(1, len(stream) + 1))


async def test_a_stream_of_another_history_is_held(database: Database, streams: Streams) -> None:
    """The database was restored: the same sequences are of other events."""
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1, 2)
        await all_ended(database)
        (stream,) = streams.streams.values()
        stream.append(stream[-1]._replace(sequence=3, delivery="of another event"))
        await publish(database, 3, 4)
        await until(lambda: last_failure(database), what="the failure")
    assert await last_failure(database) == "foreign"
    assert await fetchval(database, "SELECT sum(acked_seq) FROM lane_progress") == 2


@pytest.mark.full
async def test_a_resumed_lane_is_opened_again(database: Database, streams: Streams) -> None:
    await stream_endpoint(database)
    async with running(database, Network(), brokers=streams.connect):
        await publish(database, 1)
        await all_ended(database)
        opened = streams.opened
        async with database.at_hand() as db:
            await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="test")
            await publish(database, 2)
            await endpoint_states.resume_endpoints(db, "relay", ["shop"], actor="test")
        await all_ended(database)
    assert streams.opened > opened
    assert streams.sequences() == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "redis://broker.example/others"}, "url: an endpoint cannot move between streams"),
        ({"url": "https://example.com/"}, "url: an endpoint cannot move between streams"),
        ({"batch_max": 10}, "batch_max: is for HTTP receivers"),
    ],
)
async def test_an_endpoint_keeps_its_streams(
    database: Database, change: dict[str, Any], message: str
) -> None:
    await stream_endpoint(database)
    with pytest.raises(UsageError, match=message):
        async with database.at_hand() as db:
            await endpoint_changes.update_endpoint(
                db, "relay", "shop", lambda old: replace(old, **change),
                actor="test",
            )  # fmt: skip


@pytest.mark.full
async def test_unusable_credentials_hold_the_endpoint_and_no_other(
    database: Database, streams: Streams
) -> None:
    """Also if they were written to the table by hand."""
    await stream_endpoint(database, headers={"Authorization": "Digest x"})
    await add_endpoint(database, "other")
    network = Network()
    brokers = Brokers(EgressPolicy())
    async with running(database, network, brokers=brokers.connect):
        await publish(database, 1)
        await until(lambda: last_failure(database), what="the failure")
        assert network.data() == [1]
    assert await last_failure(database) == "misconfigured"
    detail = "SELECT max(last_response ->> 'detail') FROM lane_progress"
    assert "the credentials of a broker are" in await fetchval(database, detail)
    await brokers.aclose()


@pytest.mark.full
async def test_a_url_that_is_no_longer_valid_holds_the_endpoint_until_it_is_changed(
    database: Database, streams: Streams
) -> None:
    await add_endpoint(database, url="kafka://127.0.0.1/t", lanes=1, retry=QUICK_RETRY)
    await add_endpoint(database, "other")
    async with database.at_hand() as db:
        await db.execute("UPDATE endpoint SET url = url || '?exact=1' WHERE name = 'shop'")
    network = Network()
    brokers = Brokers(EgressPolicy())
    async with running(database, network, brokers=brokers.connect):
        await publish(database, 1)
        await until(lambda: last_failure(database), what="the failure")
        await until(lambda: network.data() == [1], what="the delivery to the other endpoint")
    detail = "SELECT max(last_response ->> 'detail') FROM lane_progress"
    assert "unknown option 'exact'" in await fetchval(database, detail)
    await brokers.aclose()
    async with database.at_hand() as db:
        await endpoint_changes.update_endpoint(
            db, "relay", "shop",
            lambda old: replace(old, url="kafka://127.0.0.1/t"),
            actor="test",
        )  # fmt: skip
    async with running(database, network, brokers=streams.connect):
        await all_ended(database)
    assert streams.sequences() == [1]
