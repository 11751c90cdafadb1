"""What the errors of network and server mean for an endpoint."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_network

import pytest

from outbox.core.brokers.port import Appended, Position, Stop, StopKind
from outbox.network.egress import EgressPolicy
from outbox.network.tls import Tls
from packages.brokers.tests.rabbitmq.conftest import (
    LANE,
    OWNER,
    Stage,
    message,
    messages,
)
from tests.destinations.authority import Authority
from tests.support.brokers.wire import wire_to
from tests.support.waiting import until

pytestmark = pytest.mark.full


async def _stop(stage: Stage, **options: object) -> Stop:
    broker = stage.broker(**options)  # type: ignore[arg-type]
    standing = await broker.open(LANE, OWNER, 0, None)
    assert isinstance(standing, Stop), standing
    assert "\n" not in standing.detail
    assert "secret" not in standing.detail
    return standing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"credentials": "guest:secret"}, "user or password are wrong"),
        ({"credentials": "nobody:secret"}, "user or password are wrong"),
        ({"credentials": None}, "outbox endpoint credentials"),
        ({"query": "vhost=absent"}, "virtual host absent"),
        ({"policy": EgressPolicy()}, "loopback"),
    ],
)
async def test_settings_that_need_a_person(
    stage: Stage, options: dict[str, object], words: str
) -> None:
    stop = await _stop(stage, **options)
    assert stop.kind is StopKind.MISCONFIGURED
    assert words in stop.detail


@pytest.mark.parametrize("missing", ["configure", "write", "read"])
async def test_a_missing_right_needs_a_person(stage: Stage, missing: str) -> None:
    user = f"{stage.prefix}-{missing}"
    rights = dict.fromkeys({"configure", "write", "read"} - {missing}, ".*")
    stage.server.add_user(user, "secret", **rights)
    if missing != "configure":
        await stage.raw.create(stage.stream)
    stop = await _stop(stage, credentials=f"{user}:secret")
    assert stop.kind is StopKind.MISCONFIGURED
    assert "access refused" in stop.detail
    assert stage.stream in stop.detail


async def test_one_lane_without_rights_does_not_disturb_the_others(stage: Stage) -> None:
    stage.server.add_user(
        stage.prefix, "secret", configure=".*", read=".*", write=f"^{stage.stream}$"
    )
    broker = stage.broker(credentials=f"{stage.prefix}:secret")
    assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)
    for _ in range(3):
        standing = await broker.open("another", OWNER, 0, None)
        assert isinstance(standing, Stop)
        assert standing.kind is StopKind.MISCONFIGURED
    assert await broker.append(LANE, OWNER, 0, messages(1)) == Appended(1)


async def test_an_unreachable_server_is_retried(stage: Stage) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        stop = await _stop(stage, port=closed.getsockname()[1])
    assert stop.kind is StopKind.UNAVAILABLE


async def test_a_silent_server_is_retried_within_the_time_out(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stop = await _stop(
            stage, port=silent.getsockname()[1], timeout_s=5.0, connect_timeout_s=0.3
        )
    assert stop.kind is StopKind.UNAVAILABLE
    assert "0.3 s" in stop.detail


@pytest.mark.parametrize("response", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"AMQP\0\0\x09\x01"])
async def test_another_kind_of_server_is_named(stage: Stage, response: bytes) -> None:
    async def response_wrongly(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(response_wrongly, "127.0.0.1", 0)
    async with server:
        stop = await _stop(stage, port=server.sockets[0].getsockname()[1])
    assert stop.kind is StopKind.UNAVAILABLE
    assert "stream port" in stop.detail


async def test_a_message_that_fits_no_frame_is_refused_alone(stage: Stage) -> None:
    broker = stage.broker()
    await stage.position(broker)
    large = message(2, body=b"x" * (1024 * 1024))
    first = await broker.append(LANE, OWNER, 0, [message(1), large, message(3)])
    assert first.through == 1
    assert first.stop is not None
    assert first.stop.kind is StopKind.REFUSED
    alone = await broker.append(LANE, OWNER, 1, [large])
    assert alone.through == 1
    assert alone.stop is not None
    assert alone.stop.kind is StopKind.REFUSED
    assert await broker.append(LANE, OWNER, 1, messages(3)) == Appended(3)
    assert await stage.held() == [1, 3]


async def test_the_largest_message_is_stored_whole(stage: Stage) -> None:
    broker = stage.broker()
    await stage.position(broker)
    body = bytes(range(256)) * 4092
    assert await broker.append(LANE, OWNER, 0, [message(1, body=body)]) == Appended(1)
    assert (await stage.raw.messages(stage.stream))[0].endswith(body)


# ---------------------------------------------------------------------- the leader


async def test_the_leaders_advertised_address_is_dialed(stage: Stage) -> None:
    async with wire_to(stage.server.port) as wire:
        wire.rewrite_response = _as_another_node(stage)
        broker = stage.broker(port=wire.port)
        assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)
        wire.count()
        assert await broker.append(LANE, OWNER, 0, messages(1)) == Appended(1)
        assert wire.request_bytes == 0


async def test_the_egress_policy_covers_the_advertised_address(stage: Stage) -> None:
    async with wire_to(stage.server.port, host="127.0.0.2") as wire:
        wire.rewrite_response = _as_another_node(stage)
        stop = await _stop(
            stage,
            host="127.0.0.2",
            port=wire.port,
            policy=EgressPolicy(),
            networks=(ip_network("127.0.0.2/32"),),
        )
    assert stop.kind is StopKind.MISCONFIGURED
    assert "is loopback" in stop.detail


def _as_another_node(stage: Stage) -> object:
    """Replace the port by which a node calls itself in its response to Open."""
    mine = f"{stage.server.port}".encode()

    def rewrite(data: bytes) -> bytes:
        return data.replace(
            b"advertised_port\x00" + bytes((len(mine),)) + mine,
            b"advertised_port\x00" + bytes((len(mine),)) + b"1" * len(mine),
        )

    return rewrite


# ---------------------------------------------------------------------- TLS


def _tls(stage: Stage, **options: object) -> dict[str, object]:
    return {
        "scheme": "rabbitmq-stream+tls",
        "port": stage.server.tls_port,
        "host": "localhost",
        **options,
    }


async def test_tls_verifies_the_name_and_the_authority(stage: Stage, server_ca: str) -> None:
    trusting = Tls(ca=server_ca)
    broker = stage.broker(**_tls(stage, tls=trusting))  # type: ignore[arg-type]
    assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)
    assert await broker.append(LANE, OWNER, 0, messages(1)) == Appended(1)
    for options in (
        {"tls": Tls(ca=Authority("other").pem)},
        {"tls": None},
        {"tls": trusting, "host": "127.0.0.1"},
    ):
        stop = await _stop(stage, **_tls(stage, **options))
        assert stop.kind is StopKind.MISCONFIGURED, (options, stop)
    plain = await _stop(stage, **_tls(stage, tls=trusting, port=stage.server.port))
    assert plain.kind is StopKind.UNAVAILABLE
    assert plain.detail.startswith("connection closed at")


async def test_a_handshake_that_is_cut_is_retried(stage: Stage, server_ca: str) -> None:
    async with wire_to(stage.server.tls_port) as wire:
        wire.cut_after(responses=200)
        stop = await _stop(stage, **_tls(stage, tls=Tls(ca=server_ca), port=wire.port))
    assert stop.kind is StopKind.UNAVAILABLE, stop


async def test_a_client_certificate_is_shown(
    stage: Stage, server_ca: str, authority: Authority
) -> None:
    tls = Tls(ca=server_ca, identity="".join(authority.identity()))
    broker = stage.broker(**_tls(stage, tls=tls))  # type: ignore[arg-type]
    assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)
    stranger = Tls(ca=server_ca, identity="".join(Authority("other").identity()))
    stop = await _stop(stage, **_tls(stage, tls=stranger))
    assert stop.kind is StopKind.MISCONFIGURED, stop
    without_user = await _stop(stage, **_tls(stage, tls=tls, credentials=None))
    assert "outbox endpoint credentials" in without_user.detail


# ---------------------------------------------------------------------- the end


async def test_closing_ends_the_calls_in_flight(stage: Stage) -> None:
    async with wire_to(stage.server.port) as wire:
        broker = stage.broker(port=wire.port)
        await stage.position(broker)
        wire.mute = True
        append = asyncio.create_task(broker.append(LANE, OWNER, 0, messages(1)))
        opening = asyncio.create_task(broker.open("another", OWNER, 0, None))
        await until(stage.held, what="the message")
        await broker.aclose()
        result, standing = await append, await opening
    assert result.stop is not None
    assert result.stop.kind is StopKind.UNKNOWN
    assert isinstance(standing, Stop)
    late = await broker.open(LANE, OWNER, 0, None)
    assert isinstance(late, Stop)


# ---------------------------------------------------------------------- doctor


async def test_the_check_names_what_is_missing_and_creates_nothing(stage: Stage) -> None:
    absent = await stage.broker(query="").check([LANE])
    (missing,) = absent
    assert missing.is_error
    assert "create=1" in missing.what_to_do
    assert await stage.broker().check([LANE]) == []
    assert (await stage.position(stage.broker())) == Position(0, None)

    stage.server.add_user(stage.prefix, "secret", read=".*")
    limited = await stage.broker(credentials=f"{stage.prefix}:secret").check([LANE])
    right, node = limited
    assert "right to write: access refused" in right.what
    assert (right.is_error, node.is_error) == (True, False)
    assert "one node only" in node.what
    (refused,) = await stage.broker(credentials="guest:secret").check([LANE])
    assert refused.is_error
    assert "password" in refused.what
    # The name of the publisher is still unused, and all can be delivered.
    broker = stage.broker()
    assert await broker.check([LANE] * 300)
    await stage.position(broker)
    assert await broker.append(LANE, OWNER, 0, messages(1)) == Appended(1)
