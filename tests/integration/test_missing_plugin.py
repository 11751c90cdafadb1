"""Endpoints whose destination is not installed where a relay, or a command, runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from outbox.destinations.brokers import Brokers
from outbox.errors import UsageError
from outbox.network.egress import EgressPolicy
from outbox.plugins import BROKERS
from outbox.version import __version__
from tests.support.plugins import Distribution, FakeEntryPoint, installed
from tests.support.relay import Network, add_endpoint, exceptions, fetchval, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

OURS, THEIRS = Distribution(BROKERS, __version__), Distribution("acme-streams", "1.0")
LACKS: dict[str, tuple[Sequence[FakeEntryPoint], str]] = {
    "missing": ((), f"pip install '{BROKERS}[all]=={__version__}'"),
    "older": (
        (FakeEntryPoint("stream", Distribution(BROKERS, "0.0.9"), object()),),
        f"0.0.9, outbox-relay {__version__}; run: pip install '{BROKERS}=={__version__}'",
    ),
    "another scheme": (
        (FakeEntryPoint("other", OURS, object()),),
        "knows stream://, but other; correct the scheme",
    ),
    "doubled": (
        (FakeEntryPoint("stream", OURS, object()), FakeEntryPoint("stream", THEIRS, object())),
        f"belongs to {THEIRS.name} and to {BROKERS}; uninstall one",
    ),
    "broken": (
        (FakeEntryPoint("stream", THEIRS, ValueError("no such thing")),),
        f"{THEIRS.name} cannot be loaded for stream://: ValueError: no such thing",
    ),
    "something else": ((FakeEntryPoint("stream", THEIRS, "x"),), "is no Destination: 'x'"),
}
SCHEMES = ("stream", "redis", "nats+tls", "rabbitmq-stream", "kafka")


@pytest.mark.parametrize("lack", LACKS)
async def test_the_endpoint_is_held_and_everybody_names_the_command_that_helps(
    database: Database, outbox: Command, lack: str
) -> None:
    entries, words = LACKS[lack]
    url = "stream://127.0.0.1/events"
    await add_endpoint(database, url=url, lanes=1)
    await add_endpoint(database, name="http", lanes=1)
    network = Network()
    policy = EgressPolicy(["127.0.0.0/8"])

    async def command(*given: str) -> Any:
        return await asyncio.to_thread(
            outbox, *given, OUTBOX_DSN=database.dsn, OUTBOX_ALLOW_NETWORKS="127.0.0.0/8"
        )

    with installed(*entries):
        async with running(database, network, brokers=Brokers(policy).connect) as worker:
            await publish(database, 1, 2, 3)
            await until(lambda: network.data() == [1, 2, 3], what="the deliveries by HTTP")
            await until(lambda: not worker.readiness().ready, what="the readiness")
            assert words in str(worker.readiness().reason)
            held = "SELECT max(last_response ->> 'failure') = 'misconfigured' FROM lane_progress"
            await until(lambda: fetchval(database, held), what="the failure to be stored")
            detail = await fetchval(
                database, "SELECT max(last_response ->> 'detail') FROM lane_progress"
            )
            assert words in detail
            status = await command("status")
            assert status.code == 0, status.err
            doctor = await command("doctor")
            assert doctor.code == 1, doctor.err
            shown = " ".join(doctor.out.split())
            assert words in shown
            assert "the settings of this command reject the URL" not in shown
            verify = await command("verify")
            assert verify.code == 0, verify.out
            added = await command("endpoint", "add", "more", url)
            assert added.code == UsageError.exit_code
            assert words in added.err
            updated = await command("endpoint", "update", "shop", "--url", f"{url}2")
            assert updated.code == UsageError.exit_code
            assert words in updated.err
        dead = await fetchval(database, "SELECT count(*) FROM dead_letter")
    assert dead == 0
    assert await exceptions(database) == {}


async def test_endpoints_of_every_scheme_are_seen_and_kept_without_any_plugin(
    database: Database, outbox: Command
) -> None:
    """They stay what they are: none becomes an HTTP receiver."""
    for scheme in SCHEMES:
        await add_endpoint(database, name=scheme, url=f"{scheme}://127.0.0.1/s", lanes=2)
    network = Network()
    with installed():
        async with running(database, network, brokers=Brokers(EgressPolicy()).connect):
            await publish(database, 1)
            failed = (
                "SELECT count(DISTINCT l.endpoint_id) FROM lane_progress p JOIN lane l ON "
                "l.id = p.lane_id WHERE p.last_response ->> 'failure' = 'misconfigured'"
            )

            async def all_failed() -> bool:
                return await fetchval(database, failed) == len(SCHEMES)

            await until(all_failed, what="every endpoint to be held")
            for words in (("status",), ("verify",), ("endpoint", "list")):
                result = await asyncio.to_thread(outbox, *words, OUTBOX_DSN=database.dsn)
                assert result.code == 0, result.err
            shown = await asyncio.to_thread(
                outbox, "endpoint", "show", SCHEMES[1], OUTBOX_DSN=database.dsn
            )
            assert shown.code == 0, shown.err
            assert "signing" not in shown.out.lower()
    assert network.data() == []
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
