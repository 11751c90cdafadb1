"""DNS resolution is bounded, follows the system's settings, and isolates slow names."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from outbox.core.model.response import Failure
from outbox.destinations.http.transport import HttpTransport
from outbox.network import dns as resolving
from outbox.network import dns_cares
from outbox.network.dns import (
    CACHE_MAX_S,
    CACHE_S,
    LOOKUPS_MAX,
    RESOLVED_ADDRESSES_MAX,
    CachingResolver,
    Unresolved,
)
from outbox.network.egress import EgressPolicy
from tests.destinations.conformance import LOOPBACK, closing, to
from tests.destinations.nameserver import naming
from tests.destinations.servers import OK, respond_with, serving
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PUBLIC = "93.184.215.14"
SLOW = [f"slow{n}.example" for n in range(300)]
MANY = [f"127.{a}.{b}.1" for a in range(1, 11) for b in range(100)]


@contextlib.asynccontextmanager
async def resolver(**options: Any) -> AsyncIterator[CachingResolver]:
    names = CachingResolver(**options)
    try:
        yield names
    finally:
        await names.aclose()


@pytest.mark.system
async def test_addresses_of_both_families_are_returned() -> None:
    async with naming({"both.example": [PUBLIC, "2606:4700::1"]}) as server:
        async with resolver(**server.options) as names:
            assert sorted(await names.resolve("both.example")) == ["2606:4700::1", PUBLIC]
            # The response is cached, and the addresses rotate.
            first = {(await names.resolve("BOTH.example"))[0] for _ in range(2)}
        assert first == {"2606:4700::1", PUBLIC}
        assert len(server.asked) == 2


@pytest.mark.system
@pytest.mark.parametrize(
    ("ttl_s", "cached_s"), [(0, CACHE_S), (5, CACHE_S), (30, 30.0), (86400, CACHE_MAX_S)]
)
async def test_addresses_are_cached_for_the_lifetime_of_their_records(
    ttl_s: int, cached_s: float
) -> None:
    """Within bounds: a lifetime of 0 does not ask for each connection, and one of a day does not
    hide a change for a day.
    """
    async with naming({"moving.example": ["192.0.2.1"]}) as server:
        server.ttl_s = ttl_s
        async with resolver(**server.options) as names:
            await names.resolve("moving.example")
            expiry, addresses = names._cache["moving.example"]
            assert cached_s - 2 < expiry - asyncio.get_running_loop().time() <= cached_s
            assert names.current("MOVING.example") == ["192.0.2.1"]
            names._cache["moving.example"] = (0.0, addresses)
            # Expired: the addresses are unknown until a lookup in the background has ended.
            assert names.current("moving.example") is None
            await until(lambda: names.current("moving.example") == ["192.0.2.1"])


@pytest.mark.full
@pytest.mark.slow
async def test_a_steady_stream_follows_a_changed_name_within_its_ttl_and_10_s() -> None:
    ttl_s = 1
    hosts = {"moving.example": ["127.0.0.1"]}
    async with (
        naming(hosts) as names_server,
        serving(respond_with(OK)) as old,
        serving(respond_with(OK), host="127.0.0.2", port=old.port) as new,
        resolver(**names_server.options) as names,
        closing(HttpTransport(LOOPBACK, resolver=names)) as transport,
    ):
        names_server.ttl_s = ttl_s
        request = to(f"http://moving.example:{old.port}/")
        assert (await transport.send(request)).status == 200
        hosts["moving.example"] = ["127.0.0.2"]
        async with asyncio.timeout(ttl_s + 10):
            while not new.received:
                assert (await transport.send(request)).status == 200
                await asyncio.sleep(0.02)
        assert old.connections == 1, "the stream was not on one connection"
        assert len(old.received) > 50


@pytest.mark.system
async def test_a_name_that_does_not_resolve_has_no_current_addresses() -> None:
    async with naming({}) as server, resolver(**server.options) as names:
        for _ in range(2):
            assert names.current("gone.example") is None
            await until(lambda: not names._pending)


async def test_names_of_the_hosts_file_and_the_local_host_resolve() -> None:
    async with resolver() as names:
        assert "127.0.0.1" in await names.resolve("localhost")
        with open("/etc/hosts") as hosts:  # noqa: ASYNC230, PTH123
            lines = [line.split("#")[0].split() for line in hosts]
        for address, *aliases in filter(None, lines):
            for name in aliases:
                if address.startswith("127.") and name != "localhost":
                    assert address in await names.resolve(name)


@pytest.mark.system
async def test_a_search_domain_is_tried_unless_the_name_ends_with_a_dot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCALDOMAIN", "internal.example")  # Replaces `search` of resolv.conf.
    known = {"shop.internal.example": ["192.0.2.7"]}
    async with naming(known) as server, resolver(**server.options) as names:
        assert list(await names.resolve("shop")) == ["192.0.2.7"]
        with pytest.raises(Unresolved):
            await names.resolve("shop.")


@pytest.mark.system
async def test_changed_settings_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text("1")
    monkeypatch.setattr(dns_cares, "RESOLV_CONF", file)
    known: dict[str, list[str]] = {"slow.example": [], "good.example": [PUBLIC]}
    async with (
        naming(known) as server,
        resolver(timeout=0.1, tries=100, **server.options) as names,
    ):
        asking = asyncio.ensure_future(names.resolve("slow.example"))
        await until(lambda: server.asked != [])
        first = names._backend
        os.utime(file, ns=(1, 1))
        await names.resolve("good.example")
        assert names._backend is not first
        known["slow.example"] = [PUBLIC]  # The first resolver still completes its look-up.
        assert list(await asking) == [PUBLIC]
        assert first._closed  # type: ignore[union-attr]


@pytest.mark.system
async def test_after_an_outage_names_are_found_again() -> None:
    """c-ares' own event thread would sleep: nothing wakes it for the second look-up."""
    known: dict[str, list[str]] = {"one.example": [], "two.example": []}
    async with naming(known) as dns, resolver(timeout=0.05, tries=1, **dns.options) as names:
        for host in ("one.example", "two.example", "one.example"):
            with pytest.raises(Unresolved, match="timeout"):
                await names.resolve(host)
        known["two.example"] = [PUBLIC]
        assert list(await names.resolve("two.example")) == [PUBLIC]


@pytest.mark.system
@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("nowhere.example", "not found"),
        ("loop.example", "."),
        ("a" * 64 + ".example", "misformatted"),
        ("127.1", "not found"),
    ],
)
async def test_names_without_addresses_are_reported(host: str, says: str) -> None:
    known = {"loop.example": ["->pool.example"], "pool.example": ["->loop.example"]}
    async with naming(known) as server, resolver(**server.options) as names:
        with pytest.raises(Unresolved, match=says):
            await names.resolve(host)


@pytest.mark.system
async def test_a_thousand_addresses_are_not_all_checked() -> None:
    async with naming({"bomb.example": MANY}) as server, resolver(**server.options) as names:
        assert len(await names.resolve("bomb.example")) == RESOLVED_ADDRESSES_MAX


@pytest.mark.system
@pytest.mark.parametrize(
    ("message", "status"),
    [
        (["10.0.0.5"], None),
        (["::ffff:10.0.0.5"], None),
        (["64:ff9b::a00:5"], None),
        (["10.0.0.5", "127.0.0.1", "169.254.169.254"], 200),
        (["::ffff:127.0.0.1", "fd00::1"], 200),
    ],
)
async def test_allowed_addresses_of_a_dns_response_are_used(
    message: list[str], status: int | None
) -> None:
    async with naming({"some.example": message}) as dns, serving(respond_with(OK)) as server:
        transport = HttpTransport(LOOPBACK, resolver=CachingResolver(**dns.options))
        async with closing(transport):
            response = await transport.send(to(f"http://some.example:{server.port}/"))
    assert response.status == status
    assert response.failure is (Failure.EGRESS_REFUSED if status is None else None)


@pytest.mark.system
async def test_three_hundred_hanging_lookups_delay_no_others() -> None:
    good = {f"good{n}.example": ["127.0.0.1"] for n in range(60)}
    async with (
        naming(good | {name: [] for name in SLOW}) as dns,
        serving(respond_with(OK)) as server,
        resolver(**dns.options) as names,
        closing(HttpTransport(LOOPBACK, resolver=names)) as transport,
    ):

        async def took_s(numbers: range) -> list[float]:
            responses = []
            for n in numbers:
                url = f"http://good{n}.example:{server.port}/"
                responses.append(await transport.send(to(url)))
            assert [each.status for each in responses] == [200] * len(responses)
            return sorted(each.elapsed_s for each in responses)

        before = await took_s(range(30))
        async with asyncio.TaskGroup() as tasks:
            slow = [
                tasks.create_task(
                    transport.send(to(f"http://{name}/", connect_timeout_s=60, timeout_s=60))
                )
                for name in SLOW
            ]
            await until(lambda: len(names._pending) == len(SLOW))
            beside = await took_s(range(30, 60))
            for each in slow:
                each.cancel()
    # Each is a look-up, a connection and an exchange; a stalled one would take seconds.
    assert beside[15] < before[15] * 10 + 0.1
    assert beside[-1] < 1.0


@pytest.mark.system
async def test_a_lookup_is_shared_and_outlives_its_first_caller() -> None:
    known: dict[str, list[str]] = {"late.example": []}
    async with naming(known) as dns, resolver(timeout=0.2, tries=20, **dns.options) as names:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await names.resolve("late.example")
        assert len(names._pending) == 1
        known["late.example"] = ["192.0.2.9"]
        assert list(await names.resolve("late.example")) == ["192.0.2.9"]
        assert names._pending == {}


@pytest.mark.system
async def test_lookups_are_bounded_and_known_names_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert LOOKUPS_MAX >= 1024
    monkeypatch.setattr(resolving, "LOOKUPS_MAX", 8)
    known: dict[str, list[str]] = {"known.example": [PUBLIC], **{name: [] for name in SLOW}}
    async with naming(known) as dns, resolver(cache_s=0, **dns.options) as names:
        await names.resolve("known.example")
        for name in SLOW[:6]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await names.resolve(name)
        with pytest.raises(Unresolved, match="too many"):
            await names.resolve(SLOW[6])
        assert list(await names.resolve("known.example")) == [PUBLIC]


@pytest.mark.system
async def test_closing_ends_lookups() -> None:
    async with naming({"slow.example": []}) as dns:
        names = CachingResolver(**dns.options)
        asking = asyncio.ensure_future(names.resolve("slow.example"))
        await until(lambda: dns.asked != [])
        await names.aclose()
        with pytest.raises(Unresolved):
            await asking


@pytest.mark.system
async def test_threads_resolve_names_when_c_ares_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no inotify left")

    monkeypatch.setattr(dns_cares, "CaresChannel", refuse)
    with capture_logs() as logs:
        async with resolver() as names:
            for _ in range(2):
                assert "127.0.0.1" in await names.resolve("localhost")
            monkeypatch.setattr(socket, "getaddrinfo", _unknown)
            with pytest.raises(Unresolved, match="name or service not known"):
                await names.resolve("nowhere.example")
    assert [(line["log_level"], line["error"]) for line in logs] == [("warning", "no inotify left")]


def _unknown(*_: object, **__: object) -> None:
    raise socket.gaierror(-2, "Name or service not known")


async def test_ip_literals_are_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(CachingResolver, "resolve", never)
    async with closing(HttpTransport(EgressPolicy())) as transport:
        started = time.monotonic()
        response = await transport.send(to("https://[::1]/"))
        assert response.failure is Failure.EGRESS_REFUSED
        assert time.monotonic() - started < 10
