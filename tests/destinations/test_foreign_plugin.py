"""Plug-ins with defects: each costs its own endpoints, and no other's session."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from outbox.core.brokers.port import Appended, Message, Owner, Position, Stop, StopKind
from outbox.destinations.broker import BrokerAddress, Destination
from outbox.destinations.brokers import (
    Brokers,
    check_broker_url,
    find_destination,
    is_same_stream,
)
from outbox.destinations.descriptions import describe_destinations
from outbox.destinations.endpoint_validation import explain_url_rejection
from outbox.errors import UsageError
from outbox.network.egress import EgressPolicy
from outbox.plugins import BROKERS
from outbox.version import __version__
from tests.support.plugins import Distribution, FakeEntryPoint, installed

if TYPE_CHECKING:
    from collections.abc import Callable

OURS = Distribution("acme-streams", "1.0")
POLICY = EgressPolicy(["127.0.0.0/8"])
URL = "stream://127.0.0.1:1/events"
OWNER = Owner("database", 1)
MESSAGES = [Message(n, f"d{n}", (), b"{}") for n in (4, 5)]


class Target(NamedTuple):
    servers: Any = (("127.0.0.1", 1),)
    secure: bool = False
    streams: str = "events"


class BrokenTarget:
    @property
    def servers(self) -> object:
        raise ValueError("secret")

    secure = streams = servers


class Driver:
    """Returns what it is given, whatever that is."""

    def __init__(self, result: object) -> None:
        self._result = result

    async def open(self, *_: object, **__: object) -> object:
        return self._result

    async def append(self, *_: object) -> object:
        return self._result

    async def check(self, *_: object) -> object:
        return self._result

    async def aclose(self) -> None:
        raise KeyError("secret")


def fail(*_: object) -> Any:
    raise ValueError("secret")


def entry(
    parse_url: Callable[[str], Any] = lambda _: Target(), connect: Callable[..., Any] = fail
) -> FakeEntryPoint:
    found = Destination("Acme", URL, "A stream.", parse_url, connect)
    return FakeEntryPoint("stream", OURS, found)


PARSERS: dict[str, Callable[[str], Any]] = {
    "raises": fail,
    "returns nothing": lambda _: None,
    "raises in a property": lambda _: BrokenTarget(),
    "names no pairs": lambda _: Target(servers=("127.0.0.1",)),
    "names no hosts": lambda _: Target(servers=((None, "x"),)),
}


@pytest.mark.parametrize("name", PARSERS)
async def test_a_parser_with_a_defect_refuses_its_urls(name: str) -> None:
    with installed(entry(PARSERS[name])):
        with pytest.raises(UsageError, match=r"^url: the plug-in for stream:// has a defect: "):
            check_broker_url(URL, POLICY, ())
        assert "has a defect" in str(explain_url_rejection(URL, POLICY))
        if "names" not in name:
            with pytest.raises(UsageError, match="has a defect"):
                is_same_stream(URL, f"{URL}2")
        standing = await Brokers(POLICY).connect(BrokerAddress(URL)).open("lane", OWNER, 0, None)
    assert isinstance(standing, Stop)
    assert standing.kind is StopKind.MISCONFIGURED
    assert "secret" not in standing.detail


async def test_a_broker_that_cannot_be_made_holds_its_endpoint() -> None:
    with installed(entry()):
        broker = Brokers(POLICY).connect(BrokerAddress(URL, "user:secret"))
    appended = await broker.append("lane", OWNER, 3, MESSAGES)
    assert appended.stop is not None
    assert appended.stop.kind is StopKind.MISCONFIGURED
    assert "ValueError" in appended.stop.detail
    assert "secret" not in appended.stop.detail


def test_the_name_of_an_entry_point_may_have_capitals() -> None:
    with installed(entry()._replace(name="Stream")):
        assert find_destination("STREAM://h").title == "Acme"


def test_what_is_installed_already_is_not_proposed() -> None:
    with installed(entry()), pytest.raises(UsageError, match=f"pip install '{BROKERS}"):
        find_destination("other://h")
    ours = entry()._replace(dist=Distribution(BROKERS, __version__))
    with (
        installed(ours),
        pytest.raises(UsageError, match=r"but https, stream; correct the scheme$"),
    ):
        find_destination("other://h")


class Unhashable:
    """Compares by value, so it has no hash."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def parse(self, url: str) -> Target:
        return Target()


def test_any_function_may_parse_the_urls() -> None:
    with installed(entry(Unhashable().parse)):
        _, found = describe_destinations()
    assert (found.title, found.schemes) == ("Acme", ("stream",))


RESULTS: dict[str, object] = {
    "nothing": None,
    "a bare tuple": (5, None, None),
    "fewer than all": Appended(4),
    "more than all": Appended(6),
    "before the first": Appended(2, Stop(StopKind.UNAVAILABLE, "no")),
    "beyond the last": Appended(6, Stop(StopKind.UNAVAILABLE, "no")),
    "a stop that is none": Appended(4, "no"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", RESULTS)
async def test_a_result_that_cannot_be_is_no_result(name: str) -> None:
    """The lane is opened again, which shows where it stands."""
    with installed(entry(connect=lambda *_: Driver(RESULTS[name]))):
        broker = Brokers(POLICY).connect(BrokerAddress(URL))
    standing = await broker.open("lane", OWNER, 3, None)
    appended = await broker.append("lane", OWNER, 3, MESSAGES)
    findings = await broker.check(["lane"])
    await broker.aclose()
    assert isinstance(standing, Stop)
    assert appended.through == 3
    for stop in (standing, appended.stop):
        assert stop is not None
        assert stop.kind is StopKind.UNKNOWN
    assert all(isinstance(each.what, str) for each in findings)


async def test_a_call_that_does_not_return_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.destinations.guarded_broker.LATE_S", 0.1)

    async def wait(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    driver = SimpleNamespace(open=wait, append=wait, aclose=wait)
    with installed(entry(connect=lambda *_: driver)):
        broker = Brokers(POLICY).connect(BrokerAddress(URL, timeout_s=0.1))
    async with asyncio.timeout(20):
        standing = await broker.open("lane", OWNER, 3, None)
        appended = await broker.append("lane", OWNER, 3, MESSAGES)
        await broker.aclose()
    for stop in (standing, appended.stop):
        assert isinstance(stop, Stop)
        assert stop.kind is StopKind.UNKNOWN
        assert "TimeoutError" in stop.detail


@pytest.mark.parametrize(
    "result",
    [Appended(5, None, "receipt"), Appended(3, Stop(StopKind.UNAVAILABLE, "away")),
     Appended(4, Stop(StopKind.REFUSED, "too large"))],
)  # fmt: skip
async def test_a_result_that_can_be_is_passed_on(result: Appended) -> None:
    with installed(entry(connect=lambda *_: Driver(result))):
        broker = Brokers(POLICY).connect(BrokerAddress(URL))
        assert await broker.append("lane", OWNER, 3, MESSAGES) is result
    with installed(entry(connect=lambda *_: Driver(Position(3, "d3")))):
        broker = Brokers(POLICY).connect(BrokerAddress(URL))
        assert await broker.open("lane", OWNER, 3, None) == Position(3, "d3")
