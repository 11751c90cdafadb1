"""The health listener: its paths and statuses."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from outbox.web.address import Address
from outbox.web.health import application
from outbox.web.serving import listen, serving

pytestmark = pytest.mark.system

HERE = Address("127.0.0.1", 0)


async def no_metrics(_: str) -> tuple[bytes, str]:
    return b"", "text/plain"


async def test_the_response_has_the_reason_for_not_being_ready() -> None:
    health = application(HERE, lambda: "its lease ran out", no_metrics)
    async with (
        serving(health, await listen(HERE)) as address,
        aiohttp.ClientSession() as session,
    ):
        response = await session.get(f"{address.url}readyz")
        assert (response.status, await response.text()) == (503, "not ready: its lease ran out\n")
        assert (await session.get(f"{address.url}healthz")).status == 200
        assert (await session.get(f"{address.url}elsewhere")).status == 404


async def test_the_response_of_a_ready_relay_has_its_warning() -> None:
    health = application(HERE, lambda: None, no_metrics, lambda: "1 event missing or superfluous")
    async with serving(health, await listen(HERE)) as address, aiohttp.ClientSession() as session:
        response = await session.get(f"{address.url}readyz")
        text = "ready; warning: 1 event missing or superfluous\n"
        assert (response.status, await response.text()) == (200, text)


@pytest.mark.parametrize(
    ("listener", "host", "status"),
    [
        ("127.0.0.1", "localhost:8080", 200),
        ("127.0.0.1", "127.0.0.1", 200),
        ("127.0.0.1", "evil.example", 421),
        ("127.0.0.1", "", 421),
        ("127.0.0.1", None, 200),  # A probe of HTTP/1.0.
        ("0.0.0.0", "relay.internal", 200),  # noqa: S104 (nothing listens there)
    ],
)
async def test_a_listener_on_loopback_has_no_other_name(
    listener: str, host: str | None, status: int
) -> None:
    health = application(Address(listener, 0), lambda: None, no_metrics)
    line = "" if host is None else f"Host: {host}\r\n"
    async with serving(health, await listen(HERE)) as address:
        for path in ("metrics", "readyz", ""):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(f"GET /{path} HTTP/1.0\r\n{line}\r\n".encode())
            first = await reader.readline()
            writer.close()
            assert first.split()[1] == str(status).encode()
