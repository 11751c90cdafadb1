"""The suite of destinations shows which of them connect past the egress policy."""

from __future__ import annotations

import asyncio
import importlib
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import pytest

from outbox.destination import (
    Appended,
    BrokerAddress,
    BrokerOpener,
    Capabilities,
    Destination,
    NotConnected,
    Position,
    Server,
    Stop,
    StopKind,
    parse_broker_url,
    stop_of,
)
from outbox.errors import MissingExtra
from outbox_devtools import destination_suite
from outbox_devtools.destination_suite.egress import (
    check_exposures,
    refused_exposures,
    renamed_exposures,
    served_exposures,
)
from outbox_devtools.listening import listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from outbox.destination import (
        Broker,
        BrokerFinding,
        EgressPolicy,
        Message,
        Owner,
        Resolver,
        Standing,
    )
    from outbox_devtools.destination_suite import ServedRig

CASES = {
    "refused": refused_exposures,
    "renamed": renamed_exposures,
    "served": served_exposures,
}


class Target(NamedTuple):
    servers: tuple[Server, ...]
    secure: bool = False
    streams: str = ""


def parse_url(url: str) -> Target:
    return Target(
        parse_broker_url(
            url, ports={"line": 99}, path="name", options=(), form="line://h/n"
        ).servers
    )


class Checked:
    """Connects for each call, with the relay's opener; the server has no protocol."""

    capabilities = Capabilities(compare=True, prefix=True, fence=True, position=True)

    def __init__(self, address: BrokerAddress, policy: EgressPolicy, resolver: Resolver) -> None:
        self.policy = policy
        ((self.host, self.port),) = parse_url(address.url).servers
        self.opener = BrokerOpener(address, policy, resolver, secure=False)

    async def connect(self) -> None:
        await self.opener.open(self.host, self.port, asyncio.Protocol, secure=False)

    async def open(
        self, lane: str, owner: Owner, after: int, receipt: str | None, *, force: bool = False
    ) -> Standing:
        try:
            await self.connect()
        except NotConnected as error:
            return stop_of(error)
        except OSError as error:
            return Stop(StopKind.UNAVAILABLE, str(error))
        return Position(0, None)

    async def append(
        self, lane: str, owner: Owner, after: int, messages: Sequence[Message]
    ) -> Appended:
        standing = await self.open(lane, owner, after, None)
        return Appended(after, standing if isinstance(standing, Stop) else None)

    async def check(self, lanes: Sequence[str]) -> list[BrokerFinding]:
        return []

    async def aclose(self) -> None:
        self.opener.close()


class OpensItsOwn(Checked):
    """A stream of asyncio, to the name of the URL."""

    async def connect(self) -> None:
        _, writer = await asyncio.open_connection(self.host, self.port)
        writer.close()


class OpensInAThread(Checked):
    async def connect(self) -> None:
        def dial() -> None:
            with socket.socket() as sock:
                sock.connect_ex((self.host, self.port))

        await asyncio.to_thread(dial)


class ChecksOnce(Checked):
    """Asks for the first connection only."""

    is_checked = False

    async def connect(self) -> None:
        if not self.is_checked:
            await super().connect()
            self.is_checked = True
        else:
            await OpensItsOwn.connect(self)


class StartsAProgram(Checked):
    async def connect(self) -> None:
        await asyncio.to_thread(subprocess.run, [sys.executable, "-c", ""], check=True)


class Sends(Checked):
    """Datagrams, without a connection."""

    async def connect(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"x", (self.host, self.port))


class LineRig:
    """A server that accepts connections."""

    lanes = ("a", "b", "c")

    def __init__(
        self,
        port: int,
        connect: Callable[[BrokerAddress, EgressPolicy, Resolver], Broker],
        *,
        checks_every_address: bool = True,
    ) -> None:
        self._server = Server("127.0.0.1", port)
        self.destination = Destination(
            "Line", "line://127.0.0.1/n", "", parse_url, connect,
            checks_every_address=checks_every_address,
        )  # fmt: skip

    def address(self, server: Server | None = None) -> BrokerAddress:
        return BrokerAddress(f"line://{server or self._server}/n")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async def read(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(read) as port:
        yield port


@pytest.mark.system
@pytest.mark.parametrize("case", CASES)
async def test_a_destination_that_uses_the_opener_passes(case: str, port: int) -> None:
    rig: ServedRig = LineRig(port, Checked)
    exposures = await CASES[case](rig)
    check_exposures(rig, exposures)
    assert exposures == []


@pytest.mark.system
@pytest.mark.parametrize(
    ("case", "broker", "found"),
    [
        ("refused", OpensItsOwn, "connected to 127.0.0.1:"),
        ("refused", OpensInAThread, "connected to 127.0.0.1:"),
        ("refused", StartsAProgram, "started a program"),
        ("refused", Sends, "connected to 127.0.0.1:"),
        ("renamed", OpensItsOwn, "resolved localhost"),
        ("renamed", OpensInAThread, "got a connection"),
        ("served", OpensItsOwn, "connected to 127.0.0.1:"),
        ("served", ChecksOnce, "connected to 127.0.0.1:"),
        ("served", StartsAProgram, "no connection was seen"),
    ],
)
async def test_a_destination_that_connects_past_the_policy_is_named(
    case: str, broker: type[Checked], found: str, port: int
) -> None:
    rig = LineRig(port, broker)
    exposures = await CASES[case](rig)
    assert any(found in each for each in exposures), exposures
    with pytest.raises(AssertionError, match=f"^Line: .*{found}"):
        check_exposures(rig, exposures)


def test_the_suite_names_its_extra_where_a_package_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pytest_asyncio", None)
    with pytest.raises(MissingExtra) as missing:
        importlib.reload(destination_suite)
    assert str(missing.value) == (
        "the suite of destinations needs the package pytest_asyncio, which is not installed; run: "
        "pip install 'outbox-devtools[suite]'"
    )


@pytest.mark.system
async def test_one_that_does_not_claim_to_check_is_not_for_tenants(port: int) -> None:
    rig = LineRig(port, OpensItsOwn, checks_every_address=False)
    exposures = await refused_exposures(rig)
    with pytest.raises(pytest.xfail.Exception, match=r"^Line: connected to .*not for tenants$"):
        check_exposures(rig, exposures)
    check_exposures(rig, [])
