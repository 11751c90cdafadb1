"""The map in `docs/contributing/follow-one-event.md`: its functions exist, and the ways of an event
and of an operator's action call them in its order."""

from __future__ import annotations

import ast
import asyncio
import re
from contextlib import aclosing
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

import outbox
from outbox.cli.main import run
from outbox.destinations.http.transport import HttpTransport
from outbox.network.egress import EgressPolicy
from tests.destinations.servers import OK, Connection, serving
from tests.support.documents import read
from tests.support.recorded_calls import RecordedCall, recorded_calls
from tests.support.relay import add_endpoint, fetchval, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.support.postgres import Database

EVENT, REPLAY = "One event", "Replay a dead letter"
STATIONS_MAX = {EVENT: 27, REPLAY: 10}
CHANGES_OF_MODULE_MAX = 260
"""From the call of `publish` to the durable acknowledgement, calls in the background included."""
MAP = read("docs/contributing/follow-one-event.md")
NAMED = re.compile(r"\[`([\w.]+)`\]\(\.\./\.\./outbox/(\S+\.py)\)")

REFUSED = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
IS_ASLEEP = "SELECT last_value > extract(epoch FROM clock_timestamp()) FROM wakeup"
DEAD_LETTER = "SELECT id FROM dead_letter WHERE state = 'dead'"
EVENTS_MAX = 3
"""Events that are tried: a poll of the relay may precede the wake-up."""


def way(title: str) -> list[RecordedCall]:
    """The stations of a section, from the rows of its tables."""
    section = MAP.split(f"\n## {title}\n")[1].partition("\n## ")[0]
    stations = []
    for row in re.findall(r"^\| (?!station)(.*)", section, re.MULTILINE):
        named = NAMED.match(row)
        assert named is not None, row
        stations.append(RecordedCall(named[2], named[1]))
    return stations


@cache
def functions(module: str) -> frozenset[str]:
    """The qualified names of a module's functions, and of its classes' methods."""
    tree = ast.parse(read(f"outbox/{module}"))
    places: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    places += [(f"{each.name}.", each) for each in tree.body if isinstance(each, ast.ClassDef)]
    return frozenset(
        f"{prefix}{node.name}"
        for prefix, place in places
        for node in place.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def deviations(stations: Sequence[RecordedCall], calls: Sequence[RecordedCall]) -> list[str]:
    """The stations that are not called, and those whose first call is before an earlier one's."""
    first: dict[RecordedCall, int] = {}
    for position, call in enumerate(calls):
        first.setdefault(call, position)
    missing = [f"{each.function} is not called" for each in stations if each not in first]
    return missing + [
        f"{after.function} is called before {before.function}"
        for before, after in pairwise(each for each in stations if each in first)
        if first[after] < first[before]
    ]


def test_the_functions_of_the_map_exist() -> None:
    named = [RecordedCall(*reversed(each)) for each in NAMED.findall(MAP)]
    assert [each for each in named if each.function not in functions(each.module)] == []


@pytest.mark.parametrize("title", STATIONS_MAX)
def test_a_way_of_the_map_is_short(title: str) -> None:
    assert 1 < len(set(way(title))) == len(way(title)) <= STATIONS_MAX[title]


def test_a_deviation_from_the_map_is_reported_by_name() -> None:
    first, second, third = (RecordedCall("a.py", name) for name in ("first", "second", "third"))
    assert deviations([first, second, third], [first, second, first, third]) == []
    assert deviations([first, second, third], [first, third]) == ["second is not called"]
    assert deviations([first, second], [second, first]) == ["second is called before first"]


def changes_of_module(calls: Sequence[RecordedCall]) -> int:
    """How often one of the calls from the first station on is in another module than the last."""
    modules = [each.module for each in calls[calls.index(way(EVENT)[0]) :]]
    return sum(before != after for before, after in pairwise(modules))


@pytest.mark.one_major
@pytest.mark.system
async def test_a_relay_calls_the_functions_of_the_map_in_its_order(database: Database) -> None:
    """The relay is warm: it has sent an event, which was refused, on the same connection."""

    async def script(connection: Connection) -> None:
        response = REFUSED
        while True:
            await connection.request()
            await connection.send(response)
            response = OK

    async def publish_one() -> None:
        async with database.at_hand() as connection, connection.transaction():
            await outbox.publish(connection, "order.paid", {"order": 7}, key="order-7")

    async def ended(title: str) -> None:
        last = way(title)[-1]
        await until(lambda: last in calls, what=f"a call of {last.function}")

    async def recorded(title: str, begin: Callable[[], Awaitable[object]]) -> list[str]:
        """The deviations of a way that begins while the relay sleeps."""
        await until(lambda: fetchval(database, IS_ASLEEP), what="the relay to sleep")
        calls.clear()
        await begin()
        await ended(title)
        return deviations(way(title), calls)

    transport = HttpTransport(EgressPolicy(["127.0.0.0/8"]))
    with recorded_calls() as calls:
        async with (
            serving(script) as server,
            aclosing(transport),
            running(database, transport, poll_s=5.0, lease_s=30.0),
        ):
            await add_endpoint(database, url=server.url)
            await publish(database, 1)
            await ended(EVENT)
            dead = await fetchval(database, DEAD_LETTER)
            for _ in range(EVENTS_MAX):
                found, changes = await recorded(EVENT, publish_one), changes_of_module(calls)
                if not found and changes <= CHANGES_OF_MODULE_MAX:
                    break
            assert found == []
            assert changes <= CHANGES_OF_MODULE_MAX
            command = ["dead", "replay", str(dead), "--dsn", database.dsn]
            assert await recorded(REPLAY, lambda: asyncio.to_thread(run, command)) == []
