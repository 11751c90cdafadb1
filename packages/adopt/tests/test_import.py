"""The endpoints of other senders are added, and their customers notice nothing."""

from __future__ import annotations

import base64
import hmac
from collections import Counter
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.messages.signature import parse_secret, verify
from outbox.network.egress import EgressPolicy
from outbox_adopt.peers.document import read_records
from outbox_adopt.peers.importing import import_endpoints
from outbox_adopt.peers.translation import ImportOptions
from tests.support import peers
from tests.support.pypi import library
from tests.support.relay import Network, fetchval, running
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from outbox_adopt.peers.importing import ImportReport
    from outbox_adopt.peers.record import Record
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


def written(path: Path, records: list[dict[str, Any]]) -> list[Record]:
    path.write_bytes(orjson.dumps({"version": 1, "endpoints": records}))
    return read_records(str(path))


def svix_record(n: int, key: str, **changes: Any) -> dict[str, Any]:
    endpoint = {**peers.SVIX_ENDPOINT, "id": f"ep_{n}", "url": f"https://svix.test/{n}", **changes}
    application = {**peers.SVIX_APPLICATION, "uid": f"svix-{n}"}
    return {
        "source": "svix",
        "application": application,
        "endpoint": endpoint,
        "secret": {"key": key},
    }


def convoy_record(n: int, secret: str, **changes: Any) -> dict[str, Any]:
    own = {"owner_id": f"convoy-{n}", "url": f"https://convoy.test/{n}"}
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
    assert [each.notes for each in report.endpoints] == [each.notes for each in dry.endpoints]
    assert (report.imported, report.not_imported) == (3 * count - tenth, tenth)
    notes = Counter(note for each in report.endpoints for note in each.notes)
    assert notes == {
        "paused: it was disabled; outbox endpoint resume lets it send": tenth,
        "paused: it was paused; outbox endpoint resume lets it send": tenth,
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
    # What has changed there since is taken over.
    records[0]["endpoint"]["url"] = "https://svix.test/elsewhere"
    changed = await import_file(database, tmp_path / "a.json", records, compat_until="2099-01-01")
    assert [each.action for each in changed.endpoints] == ["change", "keep", "keep"]


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


async def test_endpoints_of_one_name_are_numbered(database: Database, tmp_path: Path) -> None:
    records = [convoy_record(1, "a", uid="1"), convoy_record(1, "b", uid="2")]
    report = await import_file(database, tmp_path / "a.json", records)
    assert [each.name for each in report.endpoints] == ["convoy-1.billing", "convoy-1.billing-2"]
