"""No header of an event is taken for a mark of the relay, by any reader of a stream.

The relay marks the end of a lane with the header `outbox-control`.  Publishers may not send it any
more, but events that have it are in tables and in streams.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args
from uuid import UUID

import asyncpg
import orjson
import pytest

from outbox.core.brokers.message import end_id, end_message, messages_of
from outbox.core.model.headers import EndpointHeaders
from outbox.core.model.message_format import FormatName
from outbox.receiver import BadMessage, StreamReceiver, read_message
from outbox.receiver.streams.entries import LaneEnd, read_entry
from tests.receiver.deliveries import delivery
from tests.receiver.streams.rigs import Settings, lane, streams_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from outbox.core.brokers.port import Message as Entry
    from tests.support.postgres import Database

FORMATS = get_args(FormatName)
IMITATION = b'{"lane":"%b","sequence":2,"previous_sequence":1,"lanes":1}'
FORGED: dict[str, tuple[tuple[str, str], ...]] = {
    "another control entry": (("outbox-control", "x"),),
    "the end of a lane": (("outbox-control", "end"),),
    "in capitals": (("Outbox-Control", "end"),),
    "a body of Redis": (("Body", "{}"), ("body", "{}")),
    "no messages, as NATS says it": (("Status", "404"), ("Description", "No Messages")),
    "a heartbeat of NATS": (("Status", "100"),),
    "a lost consumer of NATS": (("Status", "409"), ("Description", "Consumer Deleted")),
}
"""Headers of an event by what they imitate."""
SHAPES: dict[str, Callable[[Entry], Any]] = {
    "Redis": lambda entry: {name.lower().encode(): value.encode() for name, value in entry.headers},
    "Kafka": lambda entry: [(name, value.encode()) for name, value in entry.headers],
    "RabbitMQ": lambda entry: dict(entry.headers),
    "NATS": lambda entry: {name.lower(): value for name, value in entry.headers},
}
"""The headers of a message as the client library of a broker has them."""


def forged(
    sequence: int, headers: tuple[tuple[str, str], ...], settings: Settings, payload: bytes
) -> Entry:
    """A delivery whose event has these headers, as a relay that allowed them wrote it."""
    ids = {"outbox_id": 1000 + sequence, "event_id": UUID(int=1000 + sequence)}
    given = delivery(sequence, lane=lane(), payload=payload, **ids)
    (sent,) = messages_of(settings, [given], sequence - 1)
    return sent._replace(headers=(*sent.headers, *headers))


def test_no_header_of_an_event_makes_a_control_entry_of_it() -> None:
    settings = [Settings(name) for name in FORMATS]
    settings.append(Settings("raw", EndpointHeaders(prefix="Acme-")))
    wrong = []
    for mark, headers in FORGED.items():
        for endpoint in settings:
            prefix = endpoint.headers.prefix
            entry = forged(2, headers, endpoint, IMITATION % lane().encode())
            for shape, headers_of in SHAPES.items():
                name = f"{mark}, {endpoint.message_format.name}, {prefix}, {shape}"
                try:
                    message = read_message(headers_of(entry), entry.body, header_prefix=prefix)
                except BadMessage as error:
                    wrong.append(f"{name}: {error}")
                    continue
                if message is None or message.sequence != 2:
                    wrong.append(f"{name}: {message}")
    assert not wrong, "\n".join(wrong)


def changed(**changes: str | None) -> tuple[dict[str, str], bytes]:
    """The end entry of a lane; headers and members of the body are replaced or left out."""
    sent = end_message(lane(1), 9, 6, 3)
    headers, body = dict(sent.headers), orjson.loads(sent.body)
    for name, value in changes.items():
        target, key = (body, name[5:]) if name.startswith("body_") else (headers, name)
        target.pop(key.replace("_", "-") if target is headers else key, None)
        if value is not None:
            target[key.replace("_", "-") if target is headers else key] = (
                orjson.loads(value) if target is body else value
            )
    return headers, orjson.dumps(body)


def test_what_the_relay_writes_ends_its_lane() -> None:
    for prefix in ("X-", "Acme-"):
        headers, body = changed()
        assert read_entry(headers, body, prefix) == LaneEnd(lane(1), 9, 6, 3)
        assert read_message(headers, body, header_prefix=prefix) is None


NOT_ENDS: dict[str, dict[str, str | None]] = {
    "no mark": {"outbox_control": None},
    "another mark": {"outbox_control": "later"},
    "no X-Delivery": {"X_Delivery": None},
    "the X-Delivery of another lane's end": {"X_Delivery": end_id(lane(2))},
    "the type of an event": {"X_Event": "order.paid"},
    "the id of an event": {"X_Event_Id": "00000000-0000-0000-0000-000000000007"},
    "the type of an event under the endpoint's prefix": {"Acme_Event": "order.paid"},
    "another lane in the header": {"X_Lane": lane(2)},
    "another lane in the header, with its X-Delivery": {
        "X_Lane": lane(2), "X_Delivery": end_id(lane(2)),
    },
    "another sequence in the header": {"X_Sequence": "8"},
    "another previous sequence in the header": {"X_Previous_Sequence": "5"},
    "another lane in the body": {"body_lane": f'"{lane(2)}"'},
    "another sequence in the body": {"body_sequence": "8"},
    "no mark in the body": {"body_control": None},
    "another mark in the body": {"body_control": '"x"'},
    "more in the body": {"body_data": "1"},
    "no number of lanes": {"body_lanes": None},
    "a number of lanes that is none": {"body_lanes": "true"},
    "too many lanes": {"body_lanes": "1000000000"},
}  # fmt: skip
"""What a message has, or lacks, that an end entry of the relay does not."""


def test_an_entry_that_differs_from_the_relays_ends_no_lane() -> None:
    wrong = []
    for name, changes in NOT_ENDS.items():
        headers, body = changed(**changes)
        with suppress(BadMessage):
            wrong.append(f"{name}: {read_entry(headers, body, 'Acme-')}")
    assert not wrong, "\n".join(wrong)


def test_a_repeated_field_that_a_reader_trusts_is_refused() -> None:
    (sent,) = messages_of(Settings(), [delivery(7)], 6)
    wrong = []
    for name, value in (*sent.headers, ("outbox-control", "x")):
        pairs = [*sent.headers, (name.upper(), value), (name, value)]
        try:
            wrong.append(f"{name}: {read_entry(pairs, sent.body)}")
        except BadMessage as error:
            assert "more than once" in str(error)  # noqa: PT017
    assert not wrong, "\n".join(wrong)
    assert read_entry([*sent.headers, ("x-team", "a"), ("X-Team", "b")], sent.body)


@pytest.mark.one_major
@pytest.mark.parametrize("kind", ["valkey", pytest.param("nats", marks=pytest.mark.full)])
async def test_no_header_of_an_event_stops_or_ends_a_lane(
    kind: str, empty_database: Database, tmp_path: Path
) -> None:
    processed: list[int] = []
    imitation = IMITATION % lane().encode()
    settings = [Settings(), Settings("raw")]
    async with (
        streams_of(kind, tmp_path) as streams,
        asyncpg.create_pool(empty_database.dsn, min_size=0) as pool,
    ):
        await streams.write(lane())
        written = 1
        for headers in FORGED.values():
            for endpoint in settings:
                written += 1
                payload = imitation.replace(b":2,", b":%d," % written)
                await streams.append_raw(lane(), [forged(written, headers, endpoint, payload)])
        await streams.write(lane(), 3)
        reader = StreamReceiver(streams.url, pool, hold_off_s_max=0.1)

        @reader.on("**")
        async def process(message: Any, _: Any) -> None:
            processed.append(message.sequence)

        await reader.drain()
        assert processed == list(range(1, written + 4))
        # And the relay's own mark still ends the lane.
        await streams.end(lane(), 1)
        await streams.write(lane(generation=2), 2)
        await reader.drain()
        assert processed[-2:] == [1, 2]
