"""`outbox listen --endpoint`: the endpoint exists while its receiver listens, and no longer."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import orjson
import pytest

from outbox.cli.common import actor
from outbox.destinations.http.transport import HttpTransport
from outbox.network.egress import EgressPolicy
from packages.devtools.tests.cli.listening import listen
from tests.support.relay import all_ended, exceptions, fetchval, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from packages.devtools.tests.cli.listening import Listening
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.system]

URL = "https://example.com/"
DEV = ("--endpoint", "dev")
FAILED = "SELECT count(*) > 0 FROM attempt WHERE outcome <> 'delivered'"
WAITS = """
SELECT count(*) > 0 FROM pg_stat_activity
 WHERE datname = current_database() AND application_name = 'outbox-cli'
   AND state = 'idle' AND query LIKE '%endpoint_claimed%'
"""
"""Whether a command has read an endpoint."""
STATE = "SELECT state FROM endpoint WHERE name = 'dev'"


@pytest.fixture
async def transport() -> AsyncIterator[HttpTransport]:
    """That of a relay which opens no network: the endpoint opens the address of its receiver."""
    transport = HttpTransport(EgressPolicy())
    yield transport
    await transport.aclose()


@pytest.mark.slow
async def test_an_endpoint_exists_while_its_receiver_listens(
    database: Database, transport: HttpTransport, here: Command
) -> None:
    env = {"OUTBOX_DSN": database.dsn}
    with listen(*DEV, "--type", "order.*", **env) as listening:
        assert listening.before == ['added endpoint "dev" for order.*\n']
        opened = "SELECT allow_networks || lanes::text FROM endpoint"
        assert await fetchval(database, opened) == ["127.0.0.1/32", "4"]
        async with running(database, transport):
            await publish(database, 1, type="order.paid", key="order-7")
            await publish(database, 2, type="order.paid", key="order-7", tenant="acme")
            await publish(database, 3, type="cart.paid", key="order-7")
            await all_ended(database)
        taken = await asyncio.to_thread(here, "listen", *DEV)
        assert taken.code == 2
        assert 'endpoint "dev" belongs to an outbox listen that is running at ' in taken.err
        code, lines = listening.end(signal.SIGTERM)
    assert (code, lines[-1]) == (0, 'removed endpoint "dev"')
    received = [re.findall(r" (accepted|sequence \d|order\.\w+)", line) for line in lines[:2]]
    assert received == [["accepted", f"sequence {n}", "order.paid"] for n in (1, 2)]
    assert lines[2].startswith("2 requests: 2 accepted")
    assert await fetchval(database, STATE) == "removed"
    assert await exceptions(database) == {}


@pytest.mark.full
@pytest.mark.slow
async def test_the_next_receiver_takes_over_what_kill_9_has_left(
    database: Database, transport: HttpTransport
) -> None:
    local = (*DEV, "--host", "localhost")
    with listen(*local, OUTBOX_DSN=database.dsn) as killed:
        killed.end(signal.SIGKILL)
    assert await fetchval(database, STATE) == "active"
    async with running(database, transport):
        await publish(database, 1, key="order-7")
        await until(lambda: fetchval(database, FAILED), what="a refused connection")
        port = str(urlsplit(killed.url).port)
        again = (*local, "--port", port, "--type", "a.*", "--json")
        with listen(*again, OUTBOX_DSN=database.dsn) as listening:
            assert listening.before == [
                'took over endpoint "dev" for a.*, with 1 pending delivery\n'
            ]
            assert listening.url == killed.url
            await all_ended(database)
            code, lines = listening.end(signal.SIGHUP)
    assert code == 0
    received, last = (orjson.loads(line) for line in lines)
    assert (received["outcome"], received["sequence"]) == ("accepted", 1)
    assert (last["removal"]["name"], last["removal"]["pending"]) == ("dev", 0)


@pytest.mark.full
@pytest.mark.slow
async def test_a_receiver_is_started_again_with_the_same_options(database: Database) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    args = (*DEV, "--host", "localhost", "--port", str(port))
    with listen(*args, OUTBOX_DSN=database.dsn) as killed:
        killed.end(signal.SIGKILL)
    with listen(*args, OUTBOX_DSN=database.dsn) as listening:
        assert listening.before[0].startswith('took over endpoint "dev"')
        assert listening.url == killed.url
        assert listening.end()[0] == 0
    assert await fetchval(database, STATE) == "removed"


@pytest.mark.full
@pytest.mark.slow
async def test_what_is_pending_at_the_end_is_dead_lettered(
    database: Database, transport: HttpTransport
) -> None:
    env = {"OUTBOX_DSN": database.dsn}
    with listen(*DEV, "--fail-rate", "1", **env) as listening:
        with listen("--endpoint", "other", **env) as other:
            assert other.url != listening.url
            code, lines = other.end()
            assert (code, lines[-1]) == (0, 'removed endpoint "other"')
        async with running(database, transport):
            await publish(database, 1)
            await until(lambda: fetchval(database, FAILED), what="a failed attempt")
        code, lines = listening.end()
    assert (code, lines[-1]) == (
        0,
        'removing endpoint "dev": the relay dead-letters its 1 delivery; if no relay is running, '
        "the next one will",
    )
    with ExitStack() as stack:
        started = asyncio.create_task(asyncio.to_thread(stack.enter_context, listen(*DEV, **env)))
        await until(lambda: fetchval(database, WAITS), what="the next receiver")
        async with running(database, transport):
            again: Listening = await started
            assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 1
        assert again.before == [
            "its former endpoint is being removed by a relay; waiting for that\n",
            'added endpoint "dev" for all types\n',
        ]
        assert again.end()[0] == 0


def test_another_endpoint_with_the_name_is_refused(here: Command, database: Database) -> None:
    here("endpoint", "add", "dev", URL)
    result = here("listen", *DEV)
    assert result.code == 2
    assert result.error == (
        'endpoint "dev" exists already; choose another name, or remove it first'
    )
    assert here("endpoint", "list", "--json").json[0]["url"] == URL


def test_a_receiver_that_cannot_listen_leaves_nothing_behind(here: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        result = here("listen", *DEV, "--port", used.getsockname()[1])
    assert result.code == 3
    assert result.error.startswith("cannot listen on 127.0.0.1:")
    assert here("endpoint", "list", "--json").json == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--type", "a"), "--type: requires --endpoint"),
        ((*DEV, "--type", "a..b"), "types: 'a..b' is invalid"),
        ((*DEV, "--secret", "whsec_x"), "--endpoint and --secret exclude each other"),
        ((*DEV, "--host", "0.0.0.0"), "--host: 0.0.0.0 is every address of this machine"),  # noqa: S104
        ((*DEV, "--fail-rate", "2"), "fail rate: must be between 0 and 1, not 2"),
    ],
)
def test_a_usage_error_adds_nothing(here: Command, args: tuple[str, ...], says: str) -> None:
    result = here("listen", *args)
    assert result.code == 2
    assert says in result.error
    assert here("endpoint", "list", "--json").json == []


@pytest.mark.full
@pytest.mark.slow
async def test_an_endpoint_that_cannot_be_removed_is_reported(database: Database) -> None:
    with listen(*DEV, OUTBOX_DSN=database.dsn) as listening:
        async with database.connection() as owner:
            await owner.execute("ALTER SCHEMA relay RENAME TO gone")
        listening.process.send_signal(signal.SIGINT)
        _, error = listening.process.communicate(timeout=60)
    assert listening.process.returncode == 3
    assert error.startswith('outbox: endpoint "dev" was not removed: schema "relay" is not there')
    assert actor() in await fetchval(database, "SELECT state_by FROM gone.endpoint")
