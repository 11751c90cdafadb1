"""Appends to the streams of a real Valkey server."""

from __future__ import annotations

import asyncio
import ipaddress
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

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
from outbox.errors import UsageError
from outbox.network.dns import CachingResolver
from outbox.network.egress import EgressPolicy
from outbox_brokers.redis.broker import RedisBroker
from outbox_brokers.redis.target import parse_url
from outbox_devtools.destination_suite import IN_DOUBT, cutting, open_lane
from tests.support.brokers.valkey import valkey
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.brokers.valkey import Valkey

LOOPBACK = EgressPolicy((ipaddress.ip_network("127.0.0.0/8"),))
LANE, OTHER = "6814e4af3c30-1-0", "6814e4af3c30-1-1"
OWNER = Owner("7300000000000000000/16384", 1)
LATER = Owner(OWNER.identity, 2)


def message(sequence: int, size: int = 10) -> Message:
    headers = (("X-Delivery", f"delivery-{sequence}"), ("X-Sequence", str(sequence)))
    return Message(sequence, f"delivery-{sequence}", headers, b"x" * size)


def messages(*sequences: int) -> list[Message]:
    return [message(sequence) for sequence in sequences]


@asynccontextmanager
async def connected(
    url: str, policy: EgressPolicy = LOOPBACK, **settings: Any
) -> AsyncIterator[RedisBroker]:
    resolver = CachingResolver()
    broker = RedisBroker(BrokerAddress(url, **settings), policy, resolver)
    try:
        yield broker
    finally:
        await broker.aclose()
        await resolver.aclose()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Valkey]:
    async with valkey(tmp_path / "valkey") as running:
        yield running


@pytest.fixture
async def broker(server: Valkey) -> AsyncIterator[RedisBroker]:
    async with connected(server.url()) as made:
        yield made


@pytest.mark.system
async def test_messages_stand_in_the_stream_with_their_metadata(
    server: Valkey, broker: RedisBroker
) -> None:
    assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)
    assert await broker.append(LANE, OWNER, 0, messages(1, 2)) == Appended(2)
    assert await broker.append(LANE, OWNER, 2, messages(4)) == Appended(4)
    assert await server.entries(LANE) == [
        (
            f"{n}-0",
            {"x-delivery": f"delivery-{n}", "x-sequence": str(n), "body": "x" * 10},
        )
        for n in (1, 2, 4)
    ]
    assert await broker.open(LANE, OWNER, 4, None) == Position(4, "delivery-4")


@pytest.mark.system
async def test_headers_may_have_any_names_and_values(server: Valkey, broker: RedisBroker) -> None:
    """The server reads as many bytes as the call announces, so a wrong length ends the lane."""
    plain = message(1)
    odd = {"X-Delivery": "delivery-2", "100%s": "äöü € 🐘", "%d": "%s", "X-Sequence": "2"}
    both = [plain, plain._replace(sequence=2, headers=tuple(odd.items()))]
    assert isinstance(await broker.open(LANE, OWNER, 0, None), Position)
    assert await broker.append(LANE, OWNER, 0, both) == Appended(2)
    assert (await server.entries(LANE))[1] == (
        "2-0",
        {name.lower(): value for name, value in odd.items()} | {"body": "x" * 10},
    )


@pytest.mark.system
async def test_the_set_of_the_lanes_has_each_lane_also_after_the_server_has_lost_it(
    server: Valkey, broker: RedisBroker
) -> None:
    lanes = {LANE.encode(), OTHER.encode()}
    for _ in range(2):
        for lane in (LANE, OTHER):
            await broker.open(lane, OWNER, 0, None)
        assert await server.command("SMEMBERS", "events:lanes") == lanes
        await server.command("FLUSHALL")


@pytest.mark.system
async def test_a_lane_is_opened_without_the_right_to_register_it(server: Valkey) -> None:
    await server.command("ACL", "SETUSER", "relay", "on", ">secret", "~events:*", "+@all", "-sadd")
    async with connected(server.url(), credentials="relay:secret") as broker:
        assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)
        assert "no right to run SADD" in str(await broker.check([LANE]))


@pytest.mark.system
async def test_an_append_needs_the_last_sequence(server: Valkey, broker: RedisBroker) -> None:
    await broker.open(LANE, OWNER, 0, None)
    await broker.append(LANE, OWNER, 0, messages(1, 2))
    for after in (0, 1, 3):
        appended = await broker.append(LANE, OWNER, after, messages(after + 1))
        assert appended.through == after
        assert appended.stop is not None
        assert appended.stop.kind is StopKind.MOVED
    assert await server.sequences(LANE) == [1, 2]


@pytest.mark.system
async def test_sequences_beyond_the_doubles_of_lua_are_compared_exactly(
    server: Valkey, broker: RedisBroker
) -> None:
    large = 2**53
    await broker.open(LANE, OWNER, 0, None)
    await broker.append(LANE, OWNER, 0, messages(large))
    appended = await broker.append(LANE, OWNER, large + 1, messages(large + 2))
    assert appended.stop is not None
    assert await broker.append(LANE, OWNER, large, messages(large + 1)) == Appended(large + 1)


@pytest.mark.system
@pytest.mark.parametrize("response_bytes", [0, 1, 7, 12])
async def test_a_lost_response_is_settled_by_the_position(
    server: Valkey, response_bytes: int
) -> None:
    """The messages are stored, and not a second time."""
    async with (
        cutting(server.port) as (proxy, port),
        connected(f"redis://127.0.0.1:{port}/events") as broker,
    ):
        await broker.open(LANE, OWNER, 0, None)
        proxy.response_bytes_max = response_bytes
        appended = await broker.append(LANE, OWNER, 0, messages(1, 2, 3))
        assert appended.through == 0
        assert appended.stop is not None
        assert appended.stop.kind in IN_DOUBT
        proxy.response_bytes_max = None
        await until(lambda: server.sequences(LANE), what="the late bytes")
        assert await broker.open(LANE, OWNER, 0, None) == Position(3, "delivery-3")
    assert await server.sequences(LANE) == [1, 2, 3]


@pytest.mark.system
@pytest.mark.parametrize("request_bytes", [1, 40, 200, 400])
async def test_a_request_that_is_cut_stores_nothing(server: Valkey, request_bytes: int) -> None:
    async with (
        cutting(server.port) as (proxy, port),
        connected(f"redis://127.0.0.1:{port}/events") as broker,
    ):
        await broker.open(LANE, OWNER, 0, None)
        proxy.request_bytes_max = request_bytes
        appended = await broker.append(LANE, OWNER, 0, messages(*range(1, 9)))
        assert appended.stop is not None
        assert appended.stop.kind in IN_DOUBT
        proxy.request_bytes_max = None
        assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)
        assert await broker.append(LANE, OWNER, 0, messages(1)) == Appended(1)
    assert await server.sequences(LANE) == [1]


@pytest.mark.system
@pytest.mark.parametrize("is_dead_lettered", [True, False])
async def test_what_a_former_owner_sends_late_is_refused(
    server: Valkey, broker: RedisBroker, is_dead_lettered: bool
) -> None:
    """Its bytes arrive after the next owner has opened the lane, and gone on."""
    async with (
        cutting(server.port) as (proxy, port),
        connected(f"redis://127.0.0.1:{port}/events") as former,
    ):
        await former.open(LANE, OWNER, 0, None)
        await former.append(LANE, OWNER, 0, messages(1))
        proxy.requests_pass.clear()
        async with asyncio.TaskGroup() as tasks:
            late = tasks.create_task(former.append(LANE, OWNER, 1, messages(2, 3)))
            await until(lambda: proxy.held_bytes, what="the bytes")
            assert await broker.open(LANE, LATER, 1, None) == Position(1, "delivery-1")
            if is_dead_lettered:
                # The sequence 2 is a dead letter by now.
                assert await broker.append(LANE, LATER, 1, messages(3)) == Appended(3)
            proxy.requests_pass.set()
            stop = (await late).stop
        assert stop is not None
        assert stop.kind is StopKind.MOVED
        assert await former.open(LANE, OWNER, 1, None) == Fenced(2)
    assert await server.sequences(LANE) == ([1, 3] if is_dead_lettered else [1])


@pytest.mark.system
async def test_what_an_owner_sent_before_it_opened_the_lane_again_is_refused(
    server: Valkey, broker: RedisBroker
) -> None:
    """Its response was lost, the stream was empty, and the delivery was dead-lettered."""
    async with (
        cutting(server.port) as (proxy, port),
        connected(f"redis://127.0.0.1:{port}/events", timeout_s=0.3) as first,
    ):
        await open_lane(first, LANE, OWNER)
        proxy.requests_pass.clear()
        stop = (await first.append(LANE, OWNER, 0, messages(1))).stop
        assert stop is not None
        assert stop.kind is StopKind.UNKNOWN
        again = OWNER._replace(opening=1)
        assert await broker.open(LANE, again, 0, None) == Position(0, None)
        proxy.requests_pass.set()
        await until(lambda: proxy.released_bytes >= proxy.held_bytes, what="the late bytes")
        assert await broker.open(LANE, again, 0, None) == Position(0, None)
        assert await broker.append(LANE, again, 0, messages(2)) == Appended(2)
    assert await server.sequences(LANE) == [2]


@pytest.mark.system
async def test_a_full_server_stores_nothing_and_goes_on_later(
    server: Valkey, broker: RedisBroker
) -> None:
    await broker.open(LANE, OWNER, 0, None)
    await broker.append(LANE, OWNER, 0, messages(1))
    await server.command("CONFIG", "SET", "maxmemory", "1")
    appended = await broker.append(LANE, OWNER, 1, messages(2, 3))
    assert appended.stop is not None
    assert appended.stop.kind is StopKind.UNAVAILABLE
    assert appended.stop.detail.startswith("OOM")
    opened = await broker.open(LANE, OWNER, 1, None)
    assert isinstance(opened, Stop)
    assert await server.sequences(LANE) == [1]
    await server.command("CONFIG", "SET", "maxmemory", "0")
    assert await broker.append(LANE, OWNER, 1, messages(2, 3)) == Appended(3)


@pytest.mark.system
async def test_a_deleted_stream_is_noticed_by_its_owner(
    server: Valkey, broker: RedisBroker
) -> None:
    await broker.open(LANE, OWNER, 0, None)
    await broker.append(LANE, OWNER, 0, messages(1, 2, 3))
    await server.command("FLUSHALL")
    appended = await broker.append(LANE, OWNER, 3, messages(4))
    assert appended.stop is not None
    assert appended.stop.kind is StopKind.MOVED
    assert await broker.open(LANE, OWNER, 3, None) == Position(0, None)
    assert await broker.append(LANE, OWNER, 0, messages(1, 2, 3)) == Appended(3)
    assert await broker.append(LANE, OWNER, 3, messages(4)) == Appended(4)


@pytest.mark.system
async def test_a_trimmed_stream_has_forgotten_nothing(server: Valkey, broker: RedisBroker) -> None:
    await broker.open(LANE, OWNER, 0, None)
    await broker.append(LANE, OWNER, 0, messages(1, 2, 3))
    await server.command("XTRIM", f"events:{{{LANE}}}", "MAXLEN", 0)
    # The fence keeps what the last message was, also for an owner who never had the response.
    assert await broker.open(LANE, LATER, 1, None) == Position(3, "delivery-3")
    assert await broker.append(LANE, LATER, 3, messages(4)) == Appended(4)
    await server.command("XDEL", f"events:{{{LANE}}}", "4-0")
    assert await broker.open(LANE, LATER, 4, None) == Position(4, "delivery-4")
    # Another writer's message that was trimmed is unknown.
    await server.command("XADD", f"events:{{{LANE}}}", "9-0", "a", "b")
    await server.command("XTRIM", f"events:{{{LANE}}}", "MAXLEN", 0)
    assert await broker.open(LANE, LATER, 4, None) == Position(9, None)


@pytest.mark.system
async def test_another_writer_is_named(server: Valkey, broker: RedisBroker) -> None:
    await broker.open(LANE, OWNER, 0, None)
    await broker.append(LANE, OWNER, 0, messages(1))
    await server.command("XADD", f"events:{{{LANE}}}", "1-1", "a", "b")
    opened = await broker.open(LANE, OWNER, 1, None)
    assert isinstance(opened, Foreign)
    assert f"events:{{{LANE}}}" in opened.detail
    assert (await broker.append(LANE, OWNER, 1, messages(2))).stop is not None


@pytest.mark.system
async def test_a_copied_database_does_not_write_here(broker: RedisBroker) -> None:
    await broker.open(LANE, OWNER, 0, None)
    copied = Owner("of another cluster", 99)
    opened = await broker.open(LANE, copied, 0, None)
    assert isinstance(opened, Foreign)
    assert OWNER.identity in opened.detail
    assert await broker.append(LANE, OWNER, 0, messages(1)) == Appended(1)


@pytest.mark.system
async def test_a_server_that_hangs_leaves_nothing_behind(server: Valkey) -> None:
    """The call ends in time, and only what was on its way is stored."""
    async with connected(server.url(), timeout_s=0.3) as broker:
        await open_lane(broker, LANE, OWNER)
        server.freeze()
        try:
            first, second = await asyncio.gather(
                broker.append(LANE, OWNER, 0, messages(1)),
                broker.open(OTHER, OWNER, 0, None),
            )
            assert first.stop is not None
            assert first.stop.kind is StopKind.UNKNOWN
            assert isinstance(second, Stop)
            again = await broker.append(LANE, OWNER, 0, messages(2))
            assert again.stop is not None
        finally:
            server.thaw()
        await until(lambda: server.sequences(LANE), what="the bytes that were on their way")
        assert await open_lane(broker, LANE, OWNER) == Position(1, "delivery-1")
    assert await server.sequences(LANE) == [1]


@pytest.mark.system
async def test_a_server_that_was_killed_goes_on_where_it_stood(
    server: Valkey, broker: RedisBroker
) -> None:
    await broker.open(LANE, OWNER, 0, None)
    await broker.append(LANE, OWNER, 0, messages(1, 2))
    server.kill()
    appended = await broker.append(LANE, OWNER, 2, messages(3))
    assert appended.stop is not None
    assert appended.stop.kind in (*IN_DOUBT, StopKind.UNAVAILABLE)
    away = await broker.open(LANE, OWNER, 2, None)
    assert isinstance(away, Stop)
    assert away.kind is StopKind.UNAVAILABLE
    await server.start()
    assert await broker.open(LANE, OWNER, 2, None) == Position(2, "delivery-2")
    assert await broker.append(LANE, OWNER, 2, messages(3)) == Appended(3)


@pytest.mark.system
async def test_a_cancelled_call_does_not_end_the_others(server: Valkey) -> None:
    async with (
        cutting(server.port) as (proxy, port),
        connected(f"redis://127.0.0.1:{port}/events") as broker,
    ):
        await broker.open(LANE, OWNER, 0, None)
        proxy.requests_pass.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(broker.open(OTHER, OWNER, 0, None))
            await until(lambda: proxy.held_bytes, what="the first call")
            cancelled = tasks.create_task(broker.append(LANE, OWNER, 0, messages(1)))
            behind = tasks.create_task(broker.open("third", OWNER, 0, None))
            await asyncio.sleep(0)
            cancelled.cancel()
            proxy.requests_pass.set()
        assert behind.result() == Position(0, None)
        assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)


@pytest.mark.system
async def test_lanes_that_wait_share_a_write(server: Valkey, broker: RedisBroker) -> None:
    lanes = [f"6814e4af3c30-1-{slot}" for slot in range(64)]
    await asyncio.gather(*(broker.open(lane, OWNER, 0, None) for lane in lanes))
    before = await reads(server)
    results = await asyncio.gather(
        *(broker.append(lane, OWNER, 0, messages(1, 2)) for lane in lanes)
    )
    assert set(results) == {Appended(2)}
    assert await reads(server) - before < 10


async def reads(server: Valkey) -> int:
    info = await server.command("INFO", "stats")
    found = next(
        value
        for name, value in info.items()
        if str(name).removeprefix("b'").startswith("total_reads_processed")
    )
    return int(found)


@pytest.mark.system
@pytest.mark.parametrize(
    ("rules", "kind", "words"),
    [
        (["+@all", "-xadd"], StopKind.MISCONFIGURED, "no permissions to run the 'xadd'"),
        (["+@all", "resetkeys", "~others*"], StopKind.MISCONFIGURED, "NOPERM"),
    ],
)
async def test_a_missing_right_needs_a_person(
    server: Valkey, rules: list[str], kind: StopKind, words: str
) -> None:
    await server.command("ACL", "SETUSER", "relay", "on", ">secret", "~*", *rules)
    async with connected(server.url(), credentials="relay:secret") as broker:
        await broker.open(LANE, OWNER, 0, None)
        stop = (await broker.append(LANE, OWNER, 0, messages(1))).stop
        assert stop is not None
        assert stop.kind is kind
        assert words in stop.detail
        assert "secret" not in stop.detail


@pytest.mark.system
async def test_the_documented_rights_are_enough(server: Valkey) -> None:
    rights = "+eval +evalsha +script|load +hmget +hset +exists +xinfo|stream +xrevrange +xadd +info"
    await server.command("ACL", "SETUSER", "relay", "on", ">secret", "~events:*", *rights.split())
    async with connected(server.url(), credentials="relay:secret") as broker:
        assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)
        assert await broker.append(LANE, OWNER, 0, messages(1)) == Appended(1)
        assert await broker.open(LANE, OWNER, 1, None) == Position(1, "delivery-1")
        assert [each.what for each in await broker.check([LANE]) if each.is_error] == []


@pytest.mark.system
@pytest.mark.parametrize("credentials", ["relay:wrong", ":wrong", None])
async def test_wrong_credentials_need_a_person(server: Valkey, credentials: str | None) -> None:
    await server.command("ACL", "SETUSER", "relay", "on", ">secret", "~*", "+@all")
    await server.command("CONFIG", "SET", "requirepass", "another")
    async with connected(server.url(), credentials=credentials) as broker:
        opened = await broker.open(LANE, OWNER, 0, None)
        assert isinstance(opened, Stop)
        assert opened.kind is StopKind.MISCONFIGURED
        assert "wrong" not in opened.detail.replace("WRONGPASS", "")
        (finding,) = await broker.check([LANE])
        assert finding.is_error


@pytest.mark.system
async def test_a_key_of_another_type_needs_a_person(server: Valkey, broker: RedisBroker) -> None:
    await server.command("SET", f"events:{{{LANE}}}", "text")
    opened = await broker.open(LANE, OWNER, 0, None)
    assert isinstance(opened, Stop)
    assert opened.kind is StopKind.MISCONFIGURED
    assert "WRONGTYPE" in opened.detail


@pytest.mark.system
async def test_a_replica_takes_no_appends(server: Valkey, tmp_path: Path) -> None:
    options = ("--replicaof", "127.0.0.1", str(server.port))
    async with (
        valkey(tmp_path / "replica", *options) as other,
        connected(other.url()) as broker,
    ):
        opened = await broker.open(LANE, OWNER, 0, None)
        assert isinstance(opened, Stop)
        assert opened.kind is StopKind.UNAVAILABLE
        findings = await broker.check([LANE])
        assert findings[0].what == "the server is a replica"


@pytest.mark.system
async def test_a_loopback_address_must_be_opened(server: Valkey) -> None:
    async with connected(server.url(), EgressPolicy()) as broker:
        opened = await broker.open(LANE, OWNER, 0, None)
        assert isinstance(opened, Stop)
        assert opened.kind is StopKind.MISCONFIGURED
        assert "loopback" in opened.detail


@pytest.mark.system
async def test_the_settings_that_lose_messages_are_found(tmp_path: Path) -> None:
    options = ("--maxmemory-policy", "allkeys-lru", "--maxmemory", "50mb", "--appendonly", "no")
    async with valkey(tmp_path / "lossy", *options) as lossy, connected(lossy.url()) as broker:
        evicting, volatile = await broker.check([LANE])
    assert (evicting.is_error, volatile.is_error) == (True, False)
    assert "allkeys-lru" in evicting.what
    assert "appendonly" in volatile.what


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h/s", ("h", 6379, False, 0, "s")),
        ("rediss://h:1/a:b?db=3", ("h", 1, True, 3, "a:b")),
        ("valkeys://[::1]:7/a%2Fb", ("::1", 7, True, 0, "a/b")),
    ],
)
def test_urls(url: str, expected: tuple[Any, ...]) -> None:
    assert tuple(parse_url(url)) == expected


@pytest.mark.parametrize(
    "url", ["http://h/s", "redis://h/a{b", "redis://h/a?db=x", "redis://h/a?db=", "redis://h/a%20b",
            f"redis://h/{'s' * 201}"]
)  # fmt: skip
def test_urls_that_name_no_stream(url: str) -> None:
    with pytest.raises(UsageError, match=r"^url: "):
        parse_url(url)
