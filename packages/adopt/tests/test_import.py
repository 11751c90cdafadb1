"""The endpoints of other senders are added, and their customers notice nothing."""

from __future__ import annotations

import base64
import hmac
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.messages.signature import parse_secret, verify
from outbox.core.model.compat import Compat
from outbox.errors import NotFound
from outbox.network.egress import EgressPolicy
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import states as endpoint_states
from outbox_adopt.peers.document import SourcedRecord, read_records
from outbox_adopt.peers.importing import import_endpoints
from outbox_adopt.peers.translation import ImportOptions
from tests.support import peers
from tests.support.pypi import library
from tests.support.ranges import sequence_all
from tests.support.relay import Network, all_ended, fetchval, publish, running
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox_adopt.peers.importing import ImportReport
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

STATES = "SELECT state || ' ' || count(*) FROM endpoint GROUP BY state ORDER BY state"
PUBLISH = """
INSERT INTO outbox (type, tenant, key, payload)
SELECT 'invoice.paid', tenant, tenant, jsonb_build_object('tenant', tenant)
  FROM (SELECT DISTINCT tenant FROM endpoint) e
"""


async def import_file(
    database: Database,
    path: Path,
    records: list[dict[str, Any]],
    *,
    dry_run: bool = False,
    **options: Any,
) -> ImportReport:
    async with database.at_hand() as db:
        return await import_endpoints(
            db,
            "relay",
            written(path, records),
            ImportOptions(**options),
            policy=EgressPolicy(),
            actor="test",
            dry_run=dry_run,
        )


def written(path: Path, records: list[dict[str, Any]]) -> list[SourcedRecord]:
    path.write_bytes(orjson.dumps({"version": 1, "endpoints": records}))
    return read_records(str(path))


def svix_record(n: int, key: str, **changes: Any) -> dict[str, Any]:
    parts = {name: changes.pop(name) for name in ("headers", "transformation") if name in changes}
    own = {"id": f"ep_{n}", "uid": "billing", "url": f"https://svix.test/{n}"}
    return {
        "source": "svix",
        "application": {**peers.SVIX_APPLICATION, "uid": f"svix-{n}"},
        "endpoint": {**peers.SVIX_ENDPOINT, **own, **changes},
        "secret": {"key": key},
        "headers": {"headers": {}, "sensitive": []},
        "transformation": {"code": None, "enabled": False},
        **parts,
    }


def convoy_record(n: int, secret: str, **changes: Any) -> dict[str, Any]:
    own = {"uid": "billing", "owner_id": f"convoy-{n}", "url": f"https://convoy.test/{n}"}
    secrets = [{"uid": "1", "value": secret, "expires_at": None}]
    endpoint = {**peers.CONVOY_ENDPOINT, **own, "secrets": secrets, **changes}
    return {"source": "convoy", "endpoint": endpoint, "subscriptions": [peers.CONVOY_SUBSCRIPTION]}


def outpost_record(n: int, secret: str, **changes: Any) -> dict[str, Any]:
    own = {"id": f"des_{n}", "tenant_id": f"outpost-{n}", "topics": ["*"]}
    config = {"url": f"https://outpost.test/{n}"}
    credentials = {"secret": secret}
    destination = {**peers.OUTPOST_DESTINATION, **own, "config": config, "credentials": credentials}
    return {"source": "outpost", "destination": {**destination, **changes}}


def accepts(sent: Sent, secret: str, svix: Any) -> bool:
    """Whether the customer's receiver accepts a request, by its old secret."""
    body = sent.request.body
    if sent.url.startswith("https://svix."):
        svix.Webhook(secret).verify(body, sent.headers)
        # A receiver of Standard Webhooks has the same secret.
        verify(sent.headers, body, [parse_secret(secret)], float(sent.headers["svix-timestamp"]))
        return True
    digest = hmac.digest(secret.encode(), body, "sha256").hex()
    if sent.url.startswith("https://convoy."):
        return sent.headers["x-convoy-signature"] == digest
    return sent.headers["x-outpost-signature"] == f"v0={digest}"


@pytest.mark.parametrize("count", sampled([10, 1000]))
async def test_customers_accept_what_imported_endpoints_get(
    database: Database,
    tmp_path: Path,
    rng: random.Random,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the old secret of each, in the shapes of three senders' APIs."""
    svix = library(monkeypatch, "svix", "2.9.1")
    secrets: dict[str, str] = {}
    records = []
    for n in range(count):
        key = "whsec_" + base64.b64encode(rng.randbytes(24)).decode()
        secrets[f"https://svix.test/{n}"] = key
        records.append(svix_record(n, key, disabled=n % 10 == 9))
        text = rng.randbytes(12).hex()
        secrets[f"https://convoy.test/{n}"] = text
        status = "paused" if n % 10 == 9 else "active"
        records.append(convoy_record(n, text, status=status))
        text = "whsec_" + rng.randbytes(32).hex()
        secrets[f"https://outpost.test/{n}"] = text
        kind = "aws_sqs" if n % 10 == 9 else "webhook"
        records.append(outpost_record(n, text, type=kind))
    dry = await import_file(database, tmp_path / "a.json", records, dry_run=True)
    assert await fetchval(database, "SELECT count(*) FROM endpoint") == 0
    report = await import_file(database, tmp_path / "a.json", records)
    tenth = count // 10
    assert report.endpoints == dry.endpoints
    assert (report.added, report.not_imported) == (3 * count - tenth, tenth)
    notes = (note for each in report.endpoints for note in (*each.notes, *each.begins_disabled))
    assert Counter(notes) == {
        "it was disabled": tenth,
        "it was paused": tenth,
        "its type is aws_sqs; add the stream of a broker as an endpoint of its own": tenth,
    }
    network = Network()
    async with running(database, network):
        await fetchval(database, PUBLISH)
        wanted = 3 * (count - tenth)
        await until(lambda: len(network.accepted) >= wanted, what="all deliveries")
    assert len(network.accepted) == wanted
    for sent in network.accepted:
        assert accepts(sent, secrets[sent.url], svix)
        assert sent.url == f"https://{sent.body['tenant'].replace('-', '.test/')}"


async def test_an_import_that_is_repeated_changes_nothing(
    database: Database, tmp_path: Path
) -> None:
    records = [
        svix_record(1, peers.SVIX_KEY),
        convoy_record(2, "convoy-secret"),
        outpost_record(3, "whsec_" + "ab" * 32),
    ]
    first = await import_file(database, tmp_path / "a.json", records, compat_until="2099-01-01")
    assert {each.action for each in first.endpoints} == {"add"}
    again = await import_file(database, tmp_path / "a.json", records, compat_until="2099-01-01")
    assert {each.action for each in again.endpoints} == {"keep"}
    # What has changed there since is taken over, and shown.
    records[0]["endpoint"]["url"] = "https://svix.test/elsewhere"
    changed = await import_file(database, tmp_path / "a.json", records)
    assert [each.action for each in changed.endpoints] == ["change", "keep", "keep"]
    assert changed.endpoints[0].changed == {
        "url": ("https://svix.test/1", "https://svix.test/elsewhere")
    }
    assert (changed.added, changed.changed, changed.kept) == (0, 1, 2)


async def test_what_a_record_does_not_say_stays(database: Database, tmp_path: Path) -> None:
    """An operator has given what the other sender does not show, and changed other settings."""
    hidden = {"headers": {"X-Env": "prod"}, "sensitive": ["Authorization"]}
    records = [
        svix_record(1, peers.SVIX_KEY, headers=hidden),
        outpost_record(2, "whse***************"),
    ]
    first = await import_file(database, tmp_path / "a.json", records)
    assert [len(each.begins_disabled) for each in first.endpoints] == [1, 1]
    assert await fetchval(database, STATES) == "disabled 2"

    def completed(settings: EndpointSettings) -> EndpointSettings:
        given = {"headers": {**settings.headers, "Authorization": "Bearer 4711"}, "lanes": 2}
        if settings.tenant == "svix-1":
            return replace(settings, contact="ops@svix.test", **given)
        compat = Compat(preset="outpost", secret=peers.SVIX_KEY)
        return replace(settings, compat=compat, **given)

    async with database.at_hand() as db:
        for name in ("svix-1.billing", "outpost-2.des_2"):
            await endpoint_changes.update_endpoint(db, "relay", name, completed, actor="test")
            await endpoint_states.enable_endpoint(db, "relay", name, actor="test")
    again = await import_file(database, tmp_path / "a.json", records)
    assert [(e.action, e.begins_disabled) for e in again.endpoints] == [("keep", ())] * 2
    assert await fetchval(database, STATES) == "active 2"
    kept = """
        SELECT array_agg(headers::text || lanes || coalesce(contact, '') ORDER BY name)
          FROM endpoint"""
    assert await fetchval(database, kept) == [
        '{"X-Env": "prod", "Authorization": "Bearer 4711"}2ops@svix.test'
        if each == "svix"
        else '{"Authorization": "Bearer 4711"}2'
        for each in ("outpost", "svix")
    ]
    assert await fetchval(database, "SELECT count(*) FROM endpoint_secret WHERE compat") == 2


async def test_one_that_begins_disabled_gets_nothing_until_it_is_enabled(
    database: Database, tmp_path: Path
) -> None:
    await import_file(
        database, tmp_path / "a.json", [svix_record(1, peers.SVIX_KEY, disabled=True)]
    )
    network = Network()
    async with running(database, network):
        await publish(database, 1, type="a.b", tenant="svix-1")
        await all_ended(database)
        async with database.at_hand() as db:
            await endpoint_states.enable_endpoint(db, "relay", "svix-1.billing", actor="test")
        await publish(database, 2, type="a.b", tenant="svix-1")
        await all_ended(database)
    assert [sent.body for sent in network.accepted] == [2]


async def test_what_waits_for_the_recorder_does_not_go_to_the_customer(
    database: Database, tmp_path: Path
) -> None:
    records, to = [svix_record(1, peers.SVIX_KEY)], "http://127.0.0.1:9300/ours/"
    path = tmp_path / "a.json"
    (there,) = (await import_file(database, path, records, to=to)).endpoints
    assert there.action == "add"
    url = "SELECT url || ' ' || allow_networks::text FROM endpoint"
    recorder = "http://127.0.0.1:9300/ours/svix-1.billing {127.0.0.1/32}"
    assert await fetchval(database, url) == recorder
    await publish(database, 1, type="a.b", tenant="svix-1")
    async with database.at_hand() as db:
        await sequence_all(database)
        (refused,) = (await import_file(database, path, records)).endpoints
        assert refused.action == "not imported"
        assert (
            "1 delivery for http://127.0.0.1:9300/ours/svix-1.billing would go to"
            in refused.notes[0]
        )
        assert await fetchval(database, url) == recorder
        await db.execute(
            "UPDATE relay.lane_progress SET acked_seq = 1 WHERE lane_id IN "
            "(SELECT lane_id FROM relay.lane_counter WHERE last_seq = 1)"
        )
    (switched,) = (await import_file(database, path, records)).endpoints
    assert switched.action == "change"
    assert await fetchval(database, url) == "https://svix.test/1 {}"


async def test_one_that_is_impossible_here_does_not_keep_the_others_out(
    database: Database, tmp_path: Path
) -> None:
    records = [
        svix_record(1, peers.SVIX_KEY, url="http://10.0.0.1/"),
        svix_record(2, "whsec_c2hvcnRrZXk="),
        svix_record(3, peers.SVIX_KEY),
    ]
    report = await import_file(database, tmp_path / "a.json", records)
    assert [each.action for each in report.endpoints] == ["not imported", "not imported", "add"]
    private, short, _ = (each.notes for each in report.endpoints)
    assert private[0].startswith("url: ")
    assert short[0].startswith("secret: ")
    assert peers.SVIX_KEY not in repr(report)
    assert await fetchval(database, STATES) == "active 1"


async def test_records_of_one_name_are_refused_whatever_their_order(
    database: Database, tmp_path: Path
) -> None:
    """A number would give one customer the endpoint of another, once the order changes."""
    records = [svix_record(1, peers.SVIX_KEY), svix_record(1, peers.SVIX_KEY)]
    (refused,) = (await import_file(database, tmp_path / "a.json", records)).endpoints
    assert (refused.name, refused.action) == ("svix-1.billing", "not imported")
    assert refused.notes == ("endpoints[1] has the same name",)


async def test_an_endpoint_of_another_tenant_is_not_taken_over(
    database: Database, tmp_path: Path
) -> None:
    """The tenant a and its endpoint b.c have the name of the tenant a.b and its endpoint c."""
    records = [svix_record(1, peers.SVIX_KEY)]
    await import_file(database, tmp_path / "a.json", records)
    records[0]["application"]["uid"], records[0]["endpoint"]["uid"] = "svix-1.billing", "x"
    await fetchval(database, "UPDATE endpoint SET name = 'svix-1.billing.x'")
    (refused,) = (await import_file(database, tmp_path / "a.json", records)).endpoints
    assert refused.notes == ("an endpoint here has its name, and another tenant",)


async def test_only_some_are_imported_by_name(database: Database, tmp_path: Path) -> None:
    """Others, and those that are impossible here, are not looked at."""
    changed = svix_record(2, peers.SVIX_KEY, transformation={"enabled": True})
    records = [svix_record(1, peers.SVIX_KEY), changed]
    path = tmp_path / "a.json"
    report = await import_file(database, path, records, only=("svix-1.billing",))
    assert (report.added, report.not_imported) == (1, 0)
    report = await import_file(database, path, records, only=("svix-2.billing",))
    assert "transformation" in report.endpoints[0].notes[0]
    with pytest.raises(NotFound, match=r'"svix-2.biling"|did you mean "svix-2.billing"'):
        await import_file(database, path, records, only=("svix-2.biling",))


async def test_one_that_cannot_change_now_does_not_keep_the_others_out(
    database: Database, tmp_path: Path
) -> None:
    records = [svix_record(n, peers.SVIX_KEY) for n in (1, 2)]
    await import_file(database, tmp_path / "a.json", records)
    await fetchval(database, "UPDATE endpoint SET state = 'removing' WHERE tenant = 'svix-1'")
    for each in records:
        each["endpoint"]["throttleRate"] = 5
    report = await import_file(database, tmp_path / "a.json", records)
    assert [each.action for each in report.endpoints] == ["not imported", "change"]
