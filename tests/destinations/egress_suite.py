"""Egress rules that every transport must enforce, with and without a proxy."""

from __future__ import annotations

import socket
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.headers import format_lines
from outbox.core.model.response import Failure
from outbox.network.egress import EgressPolicy
from outbox.network.tls import Tls
from tests.destinations.authority import Authority
from tests.destinations.conformance import LOOPBACK, SHORT_S, Make, closing, to
from tests.destinations.hostile import ADDRESSES, URLS
from tests.destinations.proxies import Smokescreen, proxying
from tests.destinations.servers import OK, Connection, respond_with, serving

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator
    from pathlib import Path

CLOSED = EgressPolicy()
ELSEWHERE = (ip_network("10.77.0.0/16"),)
HERE = (ip_network("127.0.0.0/8"),)
PUBLIC = "93.184.215.14"
# The addresses of the names in hostile URLs.
NAMES: dict[str, list[str] | None] = {
    "localhost": ["127.0.0.1", "::1"],
    "localhost.": ["127.0.0.1"],
    "x.localhost": ["127.0.0.1"],
    "localhost.localdomain": ["127.0.0.1"],
    "localhost6": ["::1"],
    "ip6-localhost": ["::1"],
    "ip6-loopback": ["::1"],
    "example.com": [PUBLIC],
}
HEADERS = (("webhook-signature", "v1,c2lnbmF0dXJl"), ("Content-Type", "application/json"))


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Return every address that a socket connects to."""
    addresses: list[Any] = []
    connect = socket.socket.connect

    def note(self: socket.socket, address: Any) -> None:
        addresses.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", note)
    return addresses


class Guarding:
    """Inherit from this class beside `TransportConformance`."""

    # --------------------------------------------------------- destinations

    @pytest.mark.parametrize("networks", [(), ELSEWHERE], ids=["closed", "some open"])
    @pytest.mark.parametrize("elsewhere", [(), ELSEWHERE], ids=["", "some open for it"])
    async def test_hostile_urls_are_not_connected_to(
        self, make: Make, connected: list[Any], networks: Any, elsewhere: Any
    ) -> None:
        async with closing(make(EgressPolicy(networks), hosts=NAMES)) as transport:
            for url in URLS:
                response = await transport.send(to(url, networks=elsewhere))
                assert (response.status, response.failure) == (None, Failure.EGRESS_REFUSED), url
                assert response.detail, url
        assert connected == []

    async def test_no_name_resolves_to_a_hostile_address(
        self, make: Make, connected: list[Any]
    ) -> None:
        hosts = {f"n{n}.example": [address] for n, address in enumerate(ADDRESSES)}
        async with closing(make(CLOSED, hosts=hosts)) as transport:
            for host, (address,) in hosts.items():
                for networks in ((), ELSEWHERE):
                    response = await transport.send(to(f"https://{host}/", networks=networks))
                    assert response.failure is Failure.EGRESS_REFUSED, address
                    assert "OUTBOX_ALLOW_NETWORKS" in response.detail
        assert connected == []

    async def test_no_hostile_url_passes_the_proxy(self, make: Make, connected: list[Any]) -> None:
        """Literals and local names never reach the proxy.

        The proxy itself refuses the other names.
        """
        names = {f"n{n}.example": address for n, address in enumerate(ADDRESSES)}
        async with proxying(Smokescreen(names)) as proxy:
            transport = make(CLOSED, hosts=NAMES, proxy=proxy.proxy)
            async with closing(transport):
                for networks in ((), ELSEWHERE):
                    for url in URLS:
                        response = await transport.send(to(url, networks=networks))
                        assert response.failure is Failure.EGRESS_REFUSED, url
                assert (proxy.connections, connected) == (0, [])
                for host in names:
                    response = await transport.send(to(f"https://{host}/"))
                    assert response.failure is Failure.EGRESS_REFUSED, host
                    assert "the proxy responded 407: Deny: " in response.detail
        assert proxy.connections == len(names)

    async def test_a_mixed_dns_response_uses_the_public_address(
        self, make: Make, connected: list[Any]
    ) -> None:
        hosts = {"both.example": ["10.0.0.5", "169.254.169.254", "::ffff:10.0.0.5", "127.0.0.1"]}
        async with (
            serving(respond_with(OK)) as server,
            closing(make(LOOPBACK, hosts=hosts)) as transport,
        ):
            url = f"http://both.example:{server.port}/"
            assert (await transport.send(to(url))).status == 200
        assert connected == [("127.0.0.1", server.port)]

    async def test_few_of_a_thousand_addresses_are_tried(
        self, make: Make, connected: list[Any]
    ) -> None:
        addresses = [f"127.{a}.{b}.1" for a in range(1, 11) for b in range(100)]
        transport = make(LOOPBACK, hosts={"bomb.example": addresses})
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            url = f"http://bomb.example:{bound.getsockname()[1]}/"
            async with closing(transport):
                response = await transport.send(to(url))
        assert response.failure is Failure.CONNECT
        assert 1 <= len(connected) <= 8

    async def test_dns_rebinding_does_not_reach_internal_addresses(
        self, make: Make, connected: list[Any]
    ) -> None:
        class Rebinding(dict[str, list[str] | None]):
            """Resolves to a public address first, and to an internal one afterwards."""

            lookups = 0

            def __getitem__(self, name: str) -> list[str]:
                self.lookups += 1
                return [PUBLIC] if self.lookups % 2 == 0 else ["169.254.169.254"]

        hosts = Rebinding({"rebinding.example": None})
        CLOSED.check_url("https://rebinding.example/")
        async with closing(make(CLOSED, hosts=hosts)) as transport:
            for _ in range(2):  # A delivery and its retry.
                hosts.lookups = 0
                response = await transport.send(to("https://rebinding.example/"))
                assert response.failure is Failure.EGRESS_REFUSED
                assert hosts.lookups == 1, "it was resolved twice, and only one of them looked at"
        assert connected == []

    async def test_a_new_connection_is_checked_after_a_reused_one(
        self, make: Make, connected: list[Any]
    ) -> None:
        hosts: dict[str, list[str] | None] = {"moving.example": ["127.0.0.1"]}

        async def script(connection: Connection) -> None:
            for _ in range(2):
                await connection.request()
                await connection.send(OK)

        async with (
            serving(script) as server,
            closing(make(LOOPBACK, hosts=hosts)) as transport,
        ):
            url = f"http://moving.example:{server.port}/"
            assert (await transport.send(to(url))).status == 200
            hosts["moving.example"] = ["10.0.0.5"]
            # A kept-alive connection goes to the address that was allowed.
            assert (await transport.send(to(url))).status == 200
            await server.ended()
            response = await transport.send(to(url))
        assert response.failure is Failure.EGRESS_REFUSED
        assert len(connected) == 1

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    async def test_a_redirect_to_an_internal_address_is_not_followed(
        self, make: Make, connected: list[Any], status: int
    ) -> None:
        async with serving(respond_with(OK)) as inside:
            head = f"HTTP/1.1 {status} X\r\nLocation: {inside.url}\r\nContent-Length: 0\r\n\r\n"
            async with (
                serving(respond_with(head.encode())) as server,
                closing(make(LOOPBACK)) as transport,
            ):
                assert (await transport.send(to(server))).status == status
        assert connected == [("127.0.0.1", server.port)]

    # -------------------------------------------------------- separate pools

    async def test_networks_opened_for_one_endpoint_stay_denied_for_another(
        self, make: Make
    ) -> None:
        """Not even over the connection that the first endpoint left open."""
        async with serving(respond_with(OK)) as server, closing(make(CLOSED)) as transport:
            assert (await transport.send(to(server, networks=HERE))).status == 200
            response = await transport.send(to(server))
            assert response.failure is Failure.EGRESS_REFUSED
            response = await transport.send(to(server, networks=ELSEWHERE))
            assert response.failure is Failure.EGRESS_REFUSED
            assert (await transport.send(to(server, networks=HERE))).status == 200
        assert server.connections == 1

    async def test_connections_are_not_shared_between_endpoints_with_different_networks(
        self, make: Make
    ) -> None:
        hosts = {"inside.example": ["127.0.0.1"]}
        async with (
            serving(respond_with(OK)) as server,
            closing(make(EgressPolicy(ELSEWHERE), hosts=hosts)) as transport,
        ):
            url = f"http://inside.example:{server.port}/"
            assert (await transport.send(to(url, networks=HERE))).status == 200
            assert (await transport.send(to(url))).failure is Failure.EGRESS_REFUSED
        assert server.connections == 1

    async def test_an_endpoints_ca_does_not_apply_to_others(
        self, make: Make, authority: Authority
    ) -> None:
        own = Tls(ca=authority.pem)
        tls = authority.server("127.0.0.1")
        async with serving(respond_with(OK), tls) as server, closing(make(LOOPBACK)) as transport:
            for _ in range(2):
                assert (await transport.send(to(server, tls=own))).status == 200
            assert (await transport.send(to(server))).failure is Failure.TLS
            other = Tls(ca=Authority("other").pem)
            assert (await transport.send(to(server, tls=other))).failure is Failure.TLS
        assert [received.method for received in server.received] == ["POST", "POST"]

    async def test_an_endpoints_ca_replaces_the_relays(
        self, make: Make, authority: Authority
    ) -> None:
        transport = make(LOOPBACK, tls=authority.client())
        async with (
            serving(respond_with(OK), authority.server("127.0.0.1")) as server,
            closing(transport),
        ):
            assert (await transport.send(to(server))).status == 200
            other = Tls(ca=Authority("other").pem)
            assert (await transport.send(to(server, tls=other))).failure is Failure.TLS

    async def test_the_host_name_is_verified_with_any_ca(
        self, make: Make, authority: Authority
    ) -> None:
        tls = authority.server("other.example")
        async with serving(respond_with(OK), tls) as server, closing(make(LOOPBACK)) as transport:
            response = await transport.send(to(server, tls=Tls(ca=authority.pem)))
        assert response.failure is Failure.TLS
        assert server.received == []

    async def test_a_client_is_identified_by_its_certificate(
        self, make: Make, authority: Authority
    ) -> None:
        chain, key = authority.identity()
        known = Tls(ca=authority.pem, identity=chain + key)
        tls = authority.server("127.0.0.1", clients=authority)
        async with serving(respond_with(OK), tls) as server, closing(make(LOOPBACK)) as transport:
            for _ in range(2):
                assert (await transport.send(to(server, tls=known))).status == 200
            strange, its_key = Authority("other").identity()
            for identity in (None, strange + its_key):
                response = await transport.send(to(server, tls=Tls(authority.pem, identity)))
                # asyncio's servers close without the alert that other servers send.
                assert response.failure in (Failure.TLS, Failure.RESET)
        assert len(server.received) == 2

    async def test_an_unusable_client_certificate_is_a_tls_failure(
        self, make: Make, authority: Authority
    ) -> None:
        chain, _ = authority.identity()
        _, key = authority.identity()
        broken = Tls(ca=authority.pem, identity=chain + key)
        async with (
            serving(respond_with(OK), authority.server("127.0.0.1")) as server,
            closing(make(LOOPBACK)) as transport,
        ):
            response = await transport.send(to(server, tls=broken))
        assert response.failure is Failure.TLS
        assert "does not match the first certificate" in response.detail
        assert server.connections == 0

    # ------------------------------------------------------------------ proxy

    @pytest.mark.parametrize("secure", [False, True])
    async def test_https_uses_the_proxy(
        self,
        make: Make,
        authority: Authority,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        secure: bool,
    ) -> None:
        (tmp_path / "ca.pem").write_text(authority.pem)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))  # Options of the proxy.
        own = Tls(ca=authority.pem)
        async with serving(respond_with(OK), authority.server("shop.example")) as server:
            screen = Smokescreen(
                {"shop.example": PUBLIC}, {PUBLIC: server.port}, credentials="me:s%20cret@"
            )
            async with (
                proxying(screen, authority.server("127.0.0.1") if secure else None),
                closing(make(CLOSED, hosts={}, proxy=screen.proxy)) as transport,
            ):
                for _ in range(2):
                    response = await transport.send(
                        to("https://shop.example/a?b", tls=own, lines=format_lines(HEADERS))
                    )
                    assert (response.status, response.detail) == (200, "")
        assert screen.heads == [
            "CONNECT shop.example:443 HTTP/1.1\r\nHost: shop.example:443\r\n"
            "Proxy-Authorization: Basic bWU6cyBjcmV0\r\n\r\n"
        ]
        for received in server.received:
            assert (received.method, received.target) == ("POST", "/a?b")
            assert received.headers["host"] == "shop.example"
            assert received.headers["webhook-signature"] == "v1,c2lnbmF0dXJl"
            assert "proxy-authorization" not in received.headers

    @pytest.mark.parametrize(
        ("url", "authority_form"),
        [
            (f"https://{PUBLIC}/", f"{PUBLIC}:443"),
            ("https://[2606:4700::1111]:8443/", "[2606:4700::1111]:8443"),
        ],
    )
    async def test_public_ip_literals_use_the_proxy(
        self, make: Make, url: str, authority_form: str
    ) -> None:
        async with (
            proxying(Smokescreen(response=b"HTTP/1.1 502 Bad Gateway\r\n\r\n")) as screen,
            closing(make(CLOSED, proxy=screen.proxy)) as transport,
        ):
            response = await transport.send(to(url))
        assert (response.failure, response.detail) == (Failure.CONNECT, "the proxy responded 502")
        assert screen.heads[0].startswith(f"CONNECT {authority_form} HTTP/1.1\r\n")

    async def test_internal_destinations_bypass_the_proxy(
        self, make: Make, authority: Authority
    ) -> None:
        hosts = {"inside.example": ["127.0.0.1"], "localhost": ["127.0.0.1"]}
        async with (
            proxying(Smokescreen()) as screen,
            serving(respond_with(OK)) as plain,
            serving(respond_with(OK), authority.server("127.0.0.1", "localhost")) as secure,
            closing(make(LOOPBACK, hosts=hosts, proxy=screen.proxy)) as transport,
        ):
            for url in (
                plain.url,
                secure.url,
                f"http://inside.example:{plain.port}/",
                f"https://localhost:{secure.port}/",
            ):
                response = await transport.send(to(url, tls=Tls(ca=authority.pem)))
                assert response.status == 200, url
        assert screen.connections == 0

    async def test_names_use_only_https_ports_through_the_proxy(self, make: Make) -> None:
        """The relay does not see the address, so networks that are open here do not matter."""
        async with (
            proxying(Smokescreen()) as screen,
            closing(make(LOOPBACK, proxy=screen.proxy)) as transport,
        ):
            response = await transport.send(to("https://shop.example:6379/"))
        assert response.failure is Failure.EGRESS_REFUSED
        assert response.detail.startswith("port 6379: https to a host name uses the proxy")
        assert "ALLOW_NETWORKS" not in response.detail, "which would not help"
        assert screen.connections == 0

    @pytest.mark.parametrize(
        ("message", "failure", "detail"),
        [
            (b"HTTP/1.1 407 X\r\n\r\n", Failure.CONNECT, "the proxy responded 407"),
            (b"HTTP/1.1 403 X\r\n\r\n", Failure.CONNECT, "the proxy responded 403"),
            (
                b"HTTP/1.1 403 X\r\nX-Smokescreen-Error: Deny: Not Listed\r\n\r\n",
                Failure.EGRESS_REFUSED,
                "the proxy responded 403: Deny: Not Listed",
            ),
            (
                b"HTTP/1.1 504 X\r\nX-Smokescreen-Error: timed out\r\n\r\n",
                Failure.CONNECT,
                "the proxy responded 504: timed out",
            ),
            (b"HTTP/1.1 302 X\r\nLocation: /\r\n\r\n", Failure.CONNECT, "the proxy responded 302"),
            (b"HTTP/1.1 410 Gone\r\n\r\n", Failure.CONNECT, "the proxy responded 410"),
            (b"HTTP/1.1 200 OK\r\n\r\nhello", Failure.CONNECT, "data after its response"),
            (b"SSH-2.0-x\r\n\r\n", Failure.CONNECT, "not HTTP"),
            (b"X: " + b"x" * 100_000, Failure.CONNECT, "not HTTP"),
            (b"", Failure.CONNECT, "the proxy closed the connection"),
        ],
    )
    async def test_a_response_of_the_proxy_is_not_the_receivers(
        self, make: Make, message: bytes, failure: Failure, detail: str
    ) -> None:
        screen = Smokescreen(response=message, credentials="me:hunter2@")
        if not message:
            screen.serve = hang_up  # type: ignore[method-assign]
        async with proxying(screen), closing(make(CLOSED, proxy=screen.proxy)) as transport:
            response = await transport.send(
                to("https://shop.example/", lines=format_lines(HEADERS))
            )
        assert (response.status, response.failure) == (None, failure)
        assert detail in response.detail
        assert "hunter2" not in response.detail
        assert "signature" not in "".join(screen.heads)

    async def test_an_unreachable_proxy_is_reported(self, make: Make) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            screen = Smokescreen(port=bound.getsockname()[1], credentials="me:hunter2@")
            async with closing(make(CLOSED, proxy=screen.proxy)) as transport:
                response = await transport.send(to("https://shop.example/"))
        assert response.failure is Failure.CONNECT
        assert response.detail.startswith("the proxy: connection refused")
        assert "hunter2" not in response.detail + repr(screen.proxy)

    async def test_a_hanging_proxy_times_out(self, make: Make) -> None:
        screen = Smokescreen()
        screen.serve = hang  # type: ignore[method-assign]
        async with proxying(screen), closing(make(CLOSED, proxy=screen.proxy)) as transport:
            response = await transport.send(
                to("https://shop.example/", connect_timeout_s=SHORT_S, timeout_s=60)
            )
        assert response.failure is Failure.TIMEOUT

    async def test_a_proxy_with_the_wrong_certificate_is_refused(self, make: Make) -> None:
        screen = Smokescreen()
        async with (
            proxying(screen, Authority("unknown").server("127.0.0.1")),
            closing(make(CLOSED, proxy=screen.proxy)) as transport,
        ):
            response = await transport.send(to("https://shop.example/"))
        assert response.failure is Failure.CONNECT
        assert "the proxy: certificate verify failed" in response.detail
        assert screen.heads == []

    async def test_a_proxy_cannot_impersonate_a_receiver(
        self, make: Make, authority: Authority
    ) -> None:
        """The receiver behind the tunnel must prove its name."""
        async with serving(respond_with(OK), authority.server("evil.example")) as server:
            screen = Smokescreen({"shop.example": PUBLIC}, {PUBLIC: server.port})
            async with (
                proxying(screen),
                closing(make(CLOSED, proxy=screen.proxy)) as transport,
            ):
                for tls in (None, Tls(ca=authority.pem)):
                    response = await transport.send(to("https://shop.example/", tls=tls))
                    assert response.failure is Failure.TLS
        assert server.received == []


async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()
