"""Endpoints whose destination is not installed where a relay, or a command, runs."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from outbox.destinations.brokers import Brokers
from outbox.errors import UsageError
from outbox.network.egress import EgressPolicy
from outbox.plugins import BROKERS, DESTINATIONS
from outbox.plugins import installed as installed_entries
from outbox.version import __version__
from tests.integration.test_brokers import Streams
from tests.support.plugins import Distribution, FakeEntryPoint, installed
from tests.support.relay import (
    QUICK_RETRY,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
        "knows stream://, but https, other; correct the scheme",
    ),
    "doubled": (
        (FakeEntryPoint("stream", OURS, object()), FakeEntryPoint("stream", THEIRS, object())),
        f"belongs to {THEIRS.name} and to {BROKERS}; uninstall one",
    ),
    "broken": (
        (FakeEntryPoint("stream", THEIRS, ValueError("no such\nthing")),),
        f"{THEIRS.name} cannot be loaded for stream://: ValueError: no such thing",
    ),
    "something else": ((FakeEntryPoint("stream", THEIRS, "x"),), "is no Destination: 'str'"),
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
            readiness = worker.readiness()
            assert words in readiness.reason
            assert words not in readiness.public_reason
            assert "\n" not in readiness.reason
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
            assert (await command("endpoint", "pause", "shop")).code == 0
            await until(lambda: worker.readiness().ready, what="an endpoint that nobody waits for")
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


async def test_everything_but_a_new_url_can_be_changed_without_the_plugin(
    database: Database, outbox: Command, tmp_path: Path
) -> None:
    url, file = "stream://127.0.0.1/s", tmp_path / "endpoints.json"
    await add_endpoint(database, name="known", url=url, lanes=1)

    async def command(*given: str) -> Any:
        return await asyncio.to_thread(outbox, *given, OUTBOX_DSN=database.dsn)

    async def apply(*declared: dict[str, Any]) -> Any:
        file.write_text(json.dumps({"endpoints": declared}))
        return await command("apply", "-f", str(file))

    with installed():
        known = {"name": "known", "url": url, "types": ["order.*"]}
        applied = await apply(known)
        assert applied.code == 0, applied.err
        for refused in (
            await apply(known | {"url": f"{url}2"}),
            await apply(known, {"name": "new", "url": url}),
        ):
            assert refused.code == UsageError.exit_code
            assert "nothing that is installed here knows stream://" in refused.err
        for setting in ({"timeout": 90}, {"ca": "x"}):
            refused = await apply(known | setting)
            assert refused.code == UsageError.exit_code, setting
            assert "installed" not in refused.err
        for given in (
            ("update", "known", "--name", "renamed", "--timeout", "9"),
            ("pause", "renamed"),
            ("resume", "renamed"),
            ("credentials", "renamed", "--remove"),
            ("remove", "renamed"),
        ):
            done = await command("endpoint", *given)
            assert done.code == 0, (given, done.err)


async def test_nothing_ends_while_the_plugin_is_missing_and_later_all_is_delivered(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.delivery.endpoint_supervisor.ENDPOINTS_CHECK_EVERY_S", 0.1)
    short = {"lanes": 1, "retry": {**QUICK_RETRY, "attempts_max": 2}}
    for name, url in (("known", "stream://127.0.0.1/s"), ("wrong", "redis://127.0.0.1/a{b")):
        await add_endpoint(database, name=name, url=url, **short)
    limits = "UPDATE endpoint SET disable_after_s = 1, backlog_age_s = 1"
    await fetchval(database, limits)
    entries = [each for scheme in installed_entries(DESTINATIONS).values() for each in scheme]
    policy = EgressPolicy(["127.0.0.0/8"])
    with installed(*entries):
        async with running(database, Network(), brokers=Brokers(policy).connect):
            await publish(database, 1, 2, 3)
            wrong = "SELECT state = 'disabled' FROM endpoint WHERE name = 'wrong'"
            await until(lambda: fetchval(database, wrong), what="the other endpoint to end")
    left = "SELECT count(*) FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id"
    assert await fetchval(database, f"{left} WHERE e.name = 'known'") == 0
    assert await fetchval(database, "SELECT state FROM endpoint WHERE name = 'known'") == "active"
    streams = Streams()
    async with running(database, Network(), brokers=streams.connect):
        await all_ended(database)
    assert streams.sequences() == [1, 2, 3]
