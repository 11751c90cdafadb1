from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pytest
import trustme

from outbox.core.brokers.port import Message, Owner, Position, Stop, StopKind
from outbox.destinations.broker import BrokerAddress
from outbox.network.dns import CachingResolver
from outbox.network.egress import EgressPolicy
from outbox_brokers.rabbitmq.broker import RabbitMqBroker
from tests.destinations.authority import Authority
from tests.support.brokers.rabbitmq import PASSWORD, USER, RabbitMq, TlsFiles
from tests.support.brokers.rabbitmq_raw import RawClient, raw_client
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

LANE = "orders-1-0"
OWNER = Owner("db-1", 1)
REFERENCE = f"{OWNER.identity}/{LANE}"
LOOPBACK = EgressPolicy(["127.0.0.0/8"])
_names = count(1)


def message(sequence: int, *, lane: str = LANE, body: bytes = b"{}", of: str = "d") -> Message:
    """The delivery of a sequence; `of` stands for its database."""
    delivery = f"{of}-{sequence}"
    return Message(
        sequence,
        delivery,
        (("X-Delivery", delivery), ("X-Lane", lane), ("X-Sequence", str(sequence))),
        body,
    )


def messages(*sequences: int) -> list[Message]:
    return [message(each) for each in sequences]


class Stage:
    """A stream of the test's own, and relays that deliver to it."""

    def __init__(self, server: RabbitMq, raw: RawClient) -> None:
        self.server = server
        self.raw = raw
        self.prefix = f"t{next(_names)}"
        self.stream = f"{self.prefix}.{LANE}"
        self._resolver = CachingResolver()
        self._brokers: list[RabbitMqBroker] = []

    def broker(
        self,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        scheme: str = "rabbitmq-stream",
        query: str = "create=1",
        credentials: str | None = f"{USER}:{PASSWORD}",
        timeout_s: float = 10.0,
        policy: EgressPolicy = LOOPBACK,
        **options: object,
    ) -> RabbitMqBroker:
        url = f"{scheme}://{host}:{port or self.server.port}/{self.prefix}?{query}"
        address = BrokerAddress(url.rstrip("?"), credentials, timeout_s=timeout_s, **options)
        broker = RabbitMqBroker(address, policy, self._resolver)
        self._brokers.append(broker)
        return broker

    async def position(self, broker: RabbitMqBroker, after: int = 0) -> Position:
        """Open the lane and return where it stands; goes on while the result is in doubt."""

        async def opened() -> Position | None:
            standing = await broker.open(LANE, OWNER, after, None)
            if isinstance(standing, Position):
                return standing
            assert isinstance(standing, Stop), standing
            assert standing.kind in (StopKind.UNKNOWN, StopKind.UNAVAILABLE), standing
            return None

        return await until(opened, what="the lane")

    async def held(self) -> list[int]:
        return await self.raw.sequences(self.stream)

    async def aclose(self) -> None:
        for broker in self._brokers:
            await broker.aclose()
        await self._resolver.aclose()


@pytest.fixture(scope="session")
def authority() -> Authority:
    """The authority of the clients' certificates."""
    return Authority("brokers")


@pytest.fixture(scope="session")
def certificates() -> trustme.CA:
    """The authority of the server's certificate."""
    return trustme.CA(organization_name="servers")


@pytest.fixture(scope="session")
def server_ca(certificates: trustme.CA) -> str:
    return certificates.cert_pem.bytes().decode()


@pytest.fixture(scope="session")
def rabbitmq(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority, certificates: trustme.CA
) -> Iterator[RabbitMq]:
    """A server for all tests of the session."""
    directory = tmp_path_factory.mktemp("rabbitmq")
    files = TlsFiles(directory / "ca.pem", directory / "certificate.pem", directory / "key.pem")
    files.ca.write_text(authority.pem)
    issued = certificates.issue_cert("localhost")
    files.certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    files.key.write_bytes(issued.private_key_pem.bytes())
    with RabbitMq(directory, files) as server:
        yield server


@pytest.fixture
async def stage(rabbitmq: RabbitMq) -> AsyncIterator[Stage]:
    async with raw_client(rabbitmq.port) as raw:
        stage = Stage(rabbitmq, raw)
        yield stage
        await stage.aclose()
