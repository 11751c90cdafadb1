"""Where no transport may be led, and by whom it may be led elsewhere."""

from __future__ import annotations

import socket
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.headers import lines_of
from outbox.core.model.response import Failure
from outbox.destinations.http.egress import EgressPolicy
from outbox.destinations.interface import Tls
from tests.destinations.authority import Authority
from tests.destinations.conformance import LOOPBACK, SHORT_S, Make, closing, to
from tests.destinations.hostile import ADDRESSES, URLS
from tests.destinations.proxies import Smokescreen, proxying
from tests.destinations.servers import OK, Connection, answering, serving

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator
    from pathlib import Path

CLOSED = EgressPolicy()
ELSEWHERE = (ip_network("10.77.0.0/16"),)
HERE = (ip_network("127.0.0.0/8"),)
PUBLIC = "93.184.215.14"
# What the hostile URLs with a name in them lead to.
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


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every address that a socket is connected to."""
    addresses: list[Any] = []
    connect = socket.socket.connect

    def note(self: socket.socket, address: Any) -> None:
        addresses.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", note)
    return addresses


class Guarding:
    """Inherit beside `TransportConformance`."""

    # ------------------------------------------------------------- where to

    @pytest.mark.parametrize("networks", [(), ELSEWHERE], ids=["closed", "some open"])
    @pytest.mark.parametrize("elsewhere", [(), ELSEWHERE], ids=["", "some open for it"])
    async def test_hostile_urls_are_not_connected_to(
        self, make: Make, connected: list[Any], networks: Any, elsewhere: Any
    ) -> None:
        async with closing(make(EgressPolicy(networks), hosts=NAMES)) as transport:
            for url in URLS:
                answer = await transport.send(to(url, networks=elsewhere))
                assert (answer.status, answer.failure) == (None, Failure.EGRESS_REFUSED), url
                assert answer.detail, url
        assert connected == []

    async def test_no_name_leads_to_a_hostile_address(
        self, make: Make, connected: list[Any]
    ) -> None:
        hosts = {f"n{n}.example": [address] for n, address in enumerate(ADDRESSES)}
        async with closing(make(CLOSED, hosts=hosts)) as transport:
            for host, (address,) in hosts.items():
                for networks in ((), ELSEWHERE):
                    answer = await transport.send(to(f"https://{host}/", networks=networks))
                    assert answer.failure is Failure.EGRESS_REFUSED, address
                    assert "OUTBOX_ALLOW_NETWORKS" in answer.detail
        assert connected == []

    async def test_by_a_proxy_nothing_hostile_leaves_either(
        self, make: Make, connected: list[Any]
    ) -> None:
        """Literals and this machine's names never reach it, and of names it says no itself."""
        names = {f"n{n}.example": address for n, address in enumerate(ADDRESSES)}
        async with proxying(Smokescreen(names)) as proxy:
            transport = make(CLOSED, hosts=NAMES, proxy=proxy.proxy)
            async with closing(transport):
                for networks in ((), ELSEWHERE):
                    for url in URLS:
                        answer = await transport.send(to(url, networks=networks))
                        assert answer.failure is Failure.EGRESS_REFUSED, url
                assert (proxy.connections, connected) == (0, [])
                for host in names:
                    answer = await transport.send(to(f"https://{host}/"))
                    assert answer.failure is Failure.EGRESS_REFUSED, host
                    assert "the proxy answered 407: Deny: " in answer.detail
        assert proxy.connections == len(names)

    async def test_of_a_mixed_answer_the_public_address_is_used(
        self, make: Make, connected: list[Any]
    ) -> None:
        hosts = {"both.example": ["10.0.0.5", "169.254.169.254", "::ffff:10.0.0.5", "127.0.0.1"]}
        async with (
            serving(answering(OK)) as server,
            closing(make(LOOPBACK, hosts=hosts)) as transport,
        ):
            url = f"http://both.example:{server.port}/"
            assert (await transport.send(to(url))).status == 200
        assert connected == [("127.0.0.1", server.port)]

    async def test_of_a_thousand_addresses_a_few_are_tried(
        self, make: Make, connected: list[Any]
    ) -> None:
        addresses = [f"127.{a}.{b}.1" for a in range(1, 11) for b in range(100)]
        transport = make(LOOPBACK, hosts={"bomb.example": addresses})
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            url = f"http://bomb.example:{bound.getsockname()[1]}/"
            async with closing(transport):
                answer = await transport.send(to(url))
        assert answer.failure is Failure.CONNECT
        assert 1 <= len(connected) <= 8

    async def test_a_name_that_changes_between_look_and_connection_gains_nothing(
        self, make: Make, connected: list[Any]
    ) -> None:
        class Rebinding(dict[str, list[str] | None]):
            """Public for whoever asks first, inside for whoever asks again."""

            asked = 0

            def __getitem__(self, name: str) -> list[str]:
                self.asked += 1
                return [PUBLIC] if self.asked % 2 == 0 else ["169.254.169.254"]

        hosts = Rebinding({"rebinding.example": None})
        CLOSED.check_url("https://rebinding.example/")
        async with closing(make(CLOSED, hosts=hosts)) as transport:
            for _ in range(2):  # A delivery and its retry.
                hosts.asked = 0
                answer = await transport.send(to("https://rebinding.example/"))
                assert answer.failure is Failure.EGRESS_REFUSED
                assert hosts.asked == 1, "it was resolved twice, and only one of them looked at"
        assert connected == []

    async def test_after_a_kept_connection_a_new_one_is_looked_at(
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
            # What is kept goes where it was allowed to go.
            assert (await transport.send(to(url))).status == 200
            await server.ended()
            answer = await transport.send(to(url))
        assert answer.failure is Failure.EGRESS_REFUSED
        assert len(connected) == 1

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    async def test_a_redirect_inside_is_an_answer(
        self, make: Make, connected: list[Any], status: int
    ) -> None:
        async with serving(answering(OK)) as inside:
            head = f"HTTP/1.1 {status} X\r\nLocation: {inside.url}\r\nContent-Length: 0\r\n\r\n"
            async with (
                serving(answering(head.encode())) as server,
                closing(make(LOOPBACK)) as transport,
            ):
                assert (await transport.send(to(server))).status == status
        assert connected == [("127.0.0.1", server.port)]

    # ----------------------------------------------------------- pools apart

    async def test_what_is_open_for_one_endpoint_is_not_for_another(self, make: Make) -> None:
        """Not even over the connection that the first one left behind."""
        async with serving(answering(OK)) as server, closing(make(CLOSED)) as transport:
            assert (await transport.send(to(server, networks=HERE))).status == 200
            answer = await transport.send(to(server))
            assert answer.failure is Failure.EGRESS_REFUSED
            answer = await transport.send(to(server, networks=ELSEWHERE))
            assert answer.failure is Failure.EGRESS_REFUSED
            assert (await transport.send(to(server, networks=HERE))).status == 200
        assert server.connections == 1

    async def test_a_name_is_not_taken_over_a_neighbours_connection(self, make: Make) -> None:
        hosts = {"inside.example": ["127.0.0.1"]}
        async with (
            serving(answering(OK)) as server,
            closing(make(EgressPolicy(ELSEWHERE), hosts=hosts)) as transport,
        ):
            url = f"http://inside.example:{server.port}/"
            assert (await transport.send(to(url, networks=HERE))).status == 200
            assert (await transport.send(to(url))).failure is Failure.EGRESS_REFUSED
        assert server.connections == 1

    async def test_an_endpoints_own_trust_is_nobody_elses(
        self, make: Make, authority: Authority
    ) -> None:
        own = Tls(ca=authority.pem)
        tls = authority.server("127.0.0.1")
        async with serving(answering(OK), tls) as server, closing(make(LOOPBACK)) as transport:
            for _ in range(2):
                assert (await transport.send(to(server, tls=own))).status == 200
            assert (await transport.send(to(server))).failure is Failure.TLS
            other = Tls(ca=Authority("other").pem)
            assert (await transport.send(to(server, tls=other))).failure is Failure.TLS
        assert [received.method for received in server.received] == ["POST", "POST"]

    async def test_an_endpoints_own_trust_replaces_the_relays(
        self, make: Make, authority: Authority
    ) -> None:
        transport = make(LOOPBACK, tls=authority.client())
        async with (
            serving(answering(OK), authority.server("127.0.0.1")) as server,
            closing(transport),
        ):
            assert (await transport.send(to(server))).status == 200
            other = Tls(ca=Authority("other").pem)
            assert (await transport.send(to(server, tls=other))).failure is Failure.TLS

    async def test_the_name_is_looked_at_whoever_signed(
        self, make: Make, authority: Authority
    ) -> None:
        tls = authority.server("other.example")
        async with serving(answering(OK), tls) as server, closing(make(LOOPBACK)) as transport:
            answer = await transport.send(to(server, tls=Tls(ca=authority.pem)))
        assert answer.failure is Failure.TLS
        assert server.received == []

    async def test_a_client_is_known_by_its_certificate_alone(
        self, make: Make, authority: Authority
    ) -> None:
        chain, key = authority.identity()
        known = Tls(ca=authority.pem, identity=chain + key)
        tls = authority.server("127.0.0.1", clients=authority)
        async with serving(answering(OK), tls) as server, closing(make(LOOPBACK)) as transport:
            for _ in range(2):
                assert (await transport.send(to(server, tls=known))).status == 200
            strange, its_key = Authority("other").identity()
            for identity in (None, strange + its_key):
                answer = await transport.send(to(server, tls=Tls(authority.pem, identity)))
                # asyncio's servers go away without the alert that others send.
                assert answer.failure in (Failure.TLS, Failure.RESET)
        assert len(server.received) == 2

    async def test_an_identity_that_does_not_work_is_a_failure_of_tls(
        self, make: Make, authority: Authority
    ) -> None:
        chain, _ = authority.identity()
        _, key = authority.identity()
        broken = Tls(ca=authority.pem, identity=chain + key)
        async with (
            serving(answering(OK), authority.server("127.0.0.1")) as server,
            closing(make(LOOPBACK)) as transport,
        ):
            answer = await transport.send(to(server, tls=broken))
        assert answer.failure is Failure.TLS
        assert "not the first certificate's" in answer.detail
        assert server.connections == 0

    # ------------------------------------------------------------- by a proxy

    @pytest.mark.parametrize("secure", [False, True])
    async def test_https_leaves_by_the_proxy(
        self,
        make: Make,
        authority: Authority,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        secure: bool,
    ) -> None:
        (tmp_path / "ca.pem").write_text(authority.pem)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))  # For the proxy.
        own = Tls(ca=authority.pem)
        async with serving(answering(OK), authority.server("shop.example")) as server:
            screen = Smokescreen(
                {"shop.example": PUBLIC}, {PUBLIC: server.port}, credentials="me:s%20cret@"
            )
            async with (
                proxying(screen, authority.server("127.0.0.1") if secure else None),
                closing(make(CLOSED, hosts={}, proxy=screen.proxy)) as transport,
            ):
                for _ in range(2):
                    answer = await transport.send(
                        to("https://shop.example/a?b", tls=own, lines=lines_of(HEADERS))
                    )
                    assert (answer.status, answer.detail) == (200, "")
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
    async def test_public_literals_leave_by_the_proxy_too(
        self, make: Make, url: str, authority_form: str
    ) -> None:
        async with (
            proxying(Smokescreen(answer=b"HTTP/1.1 502 Bad Gateway\r\n\r\n")) as screen,
            closing(make(CLOSED, proxy=screen.proxy)) as transport,
        ):
            answer = await transport.send(to(url))
        assert (answer.failure, answer.detail) == (Failure.CONNECT, "the proxy answered 502")
        assert screen.heads[0].startswith(f"CONNECT {authority_form} HTTP/1.1\r\n")

    async def test_what_stays_inside_does_not_leave_by_the_proxy(
        self, make: Make, authority: Authority
    ) -> None:
        hosts = {"inside.example": ["127.0.0.1"], "localhost": ["127.0.0.1"]}
        async with (
            proxying(Smokescreen()) as screen,
            serving(answering(OK)) as plain,
            serving(answering(OK), authority.server("127.0.0.1", "localhost")) as secure,
            closing(make(LOOPBACK, hosts=hosts, proxy=screen.proxy)) as transport,
        ):
            for url in (
                plain.url,
                secure.url,
                f"http://inside.example:{plain.port}/",
                f"https://localhost:{secure.port}/",
            ):
                answer = await transport.send(to(url, tls=Tls(ca=authority.pem)))
                assert answer.status == 200, url
        assert screen.connections == 0

    async def test_by_the_proxy_a_name_has_the_ports_of_https_alone(self, make: Make) -> None:
        """Whatever is open here: where the name leads is not seen here."""
        async with (
            proxying(Smokescreen()) as screen,
            closing(make(LOOPBACK, proxy=screen.proxy)) as transport,
        ):
            answer = await transport.send(to("https://shop.example:6379/"))
        assert answer.failure is Failure.EGRESS_REFUSED
        assert answer.detail.startswith("port 6379: a name with https leaves by the proxy")
        assert "ALLOW_NETWORKS" not in answer.detail, "which would not help"
        assert screen.connections == 0

    @pytest.mark.parametrize(
        ("said", "failure", "detail"),
        [
            (b"HTTP/1.1 407 X\r\n\r\n", Failure.CONNECT, "the proxy answered 407"),
            (b"HTTP/1.1 403 X\r\n\r\n", Failure.CONNECT, "the proxy answered 403"),
            (
                b"HTTP/1.1 403 X\r\nX-Smokescreen-Error: Deny: Not Listed\r\n\r\n",
                Failure.EGRESS_REFUSED,
                "the proxy answered 403: Deny: Not Listed",
            ),
            (
                b"HTTP/1.1 504 X\r\nX-Smokescreen-Error: timed out\r\n\r\n",
                Failure.CONNECT,
                "the proxy answered 504: timed out",
            ),
            (b"HTTP/1.1 302 X\r\nLocation: /\r\n\r\n", Failure.CONNECT, "the proxy answered 302"),
            (b"HTTP/1.1 410 Gone\r\n\r\n", Failure.CONNECT, "the proxy answered 410"),
            (b"HTTP/1.1 200 OK\r\n\r\nhello", Failure.CONNECT, "more than its answer"),
            (b"SSH-2.0-x\r\n\r\n", Failure.CONNECT, "not HTTP"),
            (b"X: " + b"x" * 100_000, Failure.CONNECT, "not HTTP"),
            (b"", Failure.CONNECT, "the proxy ended the connection"),
        ],
    )
    async def test_an_answer_of_the_proxys_is_not_the_receivers(
        self, make: Make, said: bytes, failure: Failure, detail: str
    ) -> None:
        screen = Smokescreen(answer=said, credentials="me:hunter2@")
        if not said:
            screen.serve = hang_up  # type: ignore[method-assign]
        async with proxying(screen), closing(make(CLOSED, proxy=screen.proxy)) as transport:
            answer = await transport.send(to("https://shop.example/", lines=lines_of(HEADERS)))
        assert (answer.status, answer.failure) == (None, failure)
        assert detail in answer.detail
        assert "hunter2" not in answer.detail
        assert "signature" not in "".join(screen.heads)

    async def test_a_proxy_that_is_not_there(self, make: Make) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            screen = Smokescreen(port=bound.getsockname()[1], credentials="me:hunter2@")
            async with closing(make(CLOSED, proxy=screen.proxy)) as transport:
                answer = await transport.send(to("https://shop.example/"))
        assert answer.failure is Failure.CONNECT
        assert answer.detail.startswith("the proxy: connection refused")
        assert "hunter2" not in answer.detail + repr(screen.proxy)

    async def test_a_proxy_that_hangs(self, make: Make) -> None:
        screen = Smokescreen()
        screen.serve = hang  # type: ignore[method-assign]
        async with proxying(screen), closing(make(CLOSED, proxy=screen.proxy)) as transport:
            answer = await transport.send(
                to("https://shop.example/", connect_timeout_s=SHORT_S, total_timeout_s=60)
            )
        assert answer.failure is Failure.TIMEOUT

    async def test_a_proxy_with_the_wrong_certificate(self, make: Make) -> None:
        screen = Smokescreen()
        async with (
            proxying(screen, Authority("unknown").server("127.0.0.1")),
            closing(make(CLOSED, proxy=screen.proxy)) as transport,
        ):
            answer = await transport.send(to("https://shop.example/"))
        assert answer.failure is Failure.CONNECT
        assert "the proxy: certificate verify failed" in answer.detail
        assert screen.heads == []

    async def test_a_proxy_cannot_stand_in_for_a_receiver(
        self, make: Make, authority: Authority
    ) -> None:
        """What is behind the tunnel has to prove the receiver's name."""
        async with serving(answering(OK), authority.server("evil.example")) as server:
            screen = Smokescreen({"shop.example": PUBLIC}, {PUBLIC: server.port})
            async with (
                proxying(screen),
                closing(make(CLOSED, proxy=screen.proxy)) as transport,
            ):
                for tls in (None, Tls(ca=authority.pem)):
                    answer = await transport.send(to("https://shop.example/", tls=tls))
                    assert answer.failure is Failure.TLS
        assert server.received == []


async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()
