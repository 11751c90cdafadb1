"""Encrypted secrets, private keys and client certificates in the deliveries of real relays."""

from __future__ import annotations

import ssl
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
import trustme
from aiohttp import web

from outbox.core.messages.signature import parse_key, verify
from outbox.core.model.encryption_keys import format_key
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.destinations.http.transport import HttpTransport
from outbox.network.egress import EgressPolicy
from outbox.network.tls import check_identity
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import secrets as endpoint_secrets
from outbox.operations.endpoints.certificate import set_identity
from outbox.operations.endpoints.removal import remove_endpoint
from outbox.store.connection.secrets import Vault
from outbox.store.connection.store_connection import StoreConnection
from outbox.store.delivery.altered_secrets import journal_altered_secrets
from outbox.store.delivery.endpoints import read_endpoints
from outbox_api.problem import KEY_MISSING
from outbox_doctor.check import Severity
from outbox_doctor.maintenance import rotate_key
from tests.support.api import make_token, serving
from tests.support.doctor import PATH, findings_of, the_one
from tests.support.relay import (
    QUICK_RETRY,
    Network,
    all_ended,
    fetchval,
    publish,
    running,
    settings_for,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

OLD, NEW = (format_key(bytes([i]) * 32) for i in (1, 2))


async def add(database: Database, key: str, **values: Any) -> endpoint_changes.NewEndpoint:
    settings = EndpointSettings.from_dict(
        {"name": "shop", "url": "http://receiver.test/", "lanes": 1, "retry": QUICK_RETRY, **values}
    )
    async with database.at_hand() as connection:
        return await endpoint_changes.add_endpoint(
            connection, "relay", settings, actor="test", vault=vault(database, key)
        )


def vault(database: Database, key: str) -> Vault:
    return Vault.from_settings(settings_for(database, key=key))


@pytest.mark.full
async def test_deliveries_continue_during_a_key_rotation(database: Database) -> None:
    made = await add(database, OLD, headers={"X-Api-Key": "hunter2"})
    network = Network()
    async with running(database, network, key=f"{NEW} {OLD}"):
        for number in range(3):
            await publish(database, number)
            await all_ended(database)
            async with database.at_hand() as connection:
                await rotate_key.rotate_key(
                    connection, "relay", vault(database, f"{NEW} {OLD}"), actor="test"
                )
                # Reloading the settings decrypts with the new key.
                await endpoint_changes.update_endpoint(
                    connection,
                    "relay",
                    "shop",
                    lambda s: EndpointSettings.from_dict({**s.to_dict(), "rate_per_s": 100.0}),
                    actor="test",
                )
    assert network.data() == [0, 1, 2]
    for sent in network.sent:
        assert sent.headers["x-api-key"] == "hunter2"
        verify(sent.headers, sent.request.body, [parse_key(made.secret)], time.time())


async def test_only_a_relay_with_the_key_sends(
    database: Database,
) -> None:
    await add(database, OLD)
    await publish(database, 1)
    blind = Network()
    async with running(database, blind, key=NEW) as worker:
        await worker.started.wait()
        await until(
            lambda: fetchval(database, "SELECT bool_or(replica_id IS NOT NULL) FROM ownership"),
            what="the endpoint to be claimed",
        )
        await until(
            lambda: fetchval(database, "SELECT count(*) = 1 FROM delivery"), what="its number"
        )
    assert blind.sent == []
    network = Network()
    async with running(database, network, key=OLD):
        await all_ended(database)
    assert network.data() == [1]


async def test_a_receiver_verifies_with_a_public_key_or_the_old_secret(
    database: Database,
) -> None:
    made = await add(database, OLD)
    async with database.at_hand() as connection:
        rotated = await endpoint_secrets.rotate_secret(
            connection, "relay", "shop", actor="t", vault=vault(database, OLD), ed25519=True
        )
    network = Network()
    async with running(database, network, key=OLD):
        await publish(database, 1)
        await all_ended(database)
    (sent,) = network.sent
    for text in (rotated.secret, made.secret):
        verify(sent.headers, sent.request.body, [parse_key(text)], time.time())
    newest, older = sent.headers["webhook-signature"].split(" ")
    assert newest.startswith("v1a,")
    assert older.startswith("v1,")


@pytest.mark.full
async def test_a_client_certificate_is_presented_on_request(database: Database) -> None:
    receiver_ca, relay_ca = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    receiver_ca.issue_cert("127.0.0.1").configure_cert(context)
    relay_ca.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    certificate = relay_ca.issue_cert("relay.example.com")
    pem = b"".join(
        [
            *(blob.bytes() for blob in certificate.cert_chain_pems),
            certificate.private_key_pem.bytes(),
        ]
    ).decode()
    shown: list[str] = []

    async def receive(request: web.Request) -> web.Response:
        assert request.transport is not None
        peer = request.transport.get_extra_info("peercert")
        shown.append(dict(peer["subjectAltName"])["DNS"])
        return web.Response()

    app = web.Application()
    app.router.add_post("/", receive)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}/"
    transport = HttpTransport(EgressPolicy())
    try:
        await add(
            database,
            OLD,
            url=url,
            ca=receiver_ca.cert_pem.bytes().decode(),
            allow_networks=("127.0.0.1/32",),
            retry={"attempts_max": 1000, "base_s": 0.01, "cap_s": 0.05},
        )
        async with running(database, transport, key=OLD):
            await publish(database, 1)
            await until(
                lambda: fetchval(
                    database, "SELECT bool_or(last_response IS NOT NULL) FROM endpoint_health"
                ),
                what="the handshake to fail",
            )
            assert shown == []
            async with database.at_hand() as connection:
                about = asdict(check_identity(pem))
                await set_identity(
                    connection, "relay", "shop", pem, about, actor="t", vault=vault(database, OLD)
                )
            await all_ended(database)
    finally:
        await transport.aclose()
        await runner.cleanup()
    assert shown == ["relay.example.com"]
    stored = await fetchval(database, "SELECT identity FROM endpoint")
    assert stored.startswith("sealed:")
    assert "PRIVATE" not in str(await fetchval(database, "SELECT array_agg(data) FROM journal"))


async def test_a_removed_endpoint_leaves_no_secret(database: Database) -> None:
    await add(database, OLD, headers={"X-Api-Key": "hunter2"})
    async with database.at_hand() as connection:
        await remove_endpoint(connection, "relay", "shop", actor="t")
    left = "SELECT headers::text || coalesce(identity, '') FROM endpoint"
    assert await fetchval(database, left) == "{}"
    assert await fetchval(database, "SELECT count(*) FROM endpoint_secret") == 0


ALTERATIONS = {
    "the secret of another endpoint": """
        UPDATE endpoint_secret SET secret = (SELECT secret FROM endpoint_secret s JOIN endpoint e
                                               ON e.id = s.endpoint_id WHERE e.name = 'other')
    """,
    "a secret as a header": """
        UPDATE endpoint SET headers = jsonb_build_object('X-Api-Key', jsonb_build_object('sealed',
               (SELECT secret FROM endpoint_secret WHERE endpoint_id = endpoint.id)))
    """,
    "a changed byte": "UPDATE endpoint_secret SET secret = overlay(secret placing 'AAAA' from 40)",
}
OF_SHOP = {
    name: "name = 'shop'"
    if "header" in name
    else "endpoint_id = (SELECT id FROM endpoint WHERE name = 'shop')"
    for name in ALTERATIONS
}
JOURNAL = """
SELECT array_agg(kind || ': ' || (data ->> 'reason') ORDER BY id) FROM journal
 WHERE kind = 'secret_altered'
"""
LOADED = "SELECT bool_and(replica_id IS NOT NULL) FROM ownership"


@pytest.mark.parametrize("alteration", sampled(ALTERATIONS))
async def test_an_altered_secret_is_an_alarm_until_it_is_set_again(
    database: Database, alteration: str, logs: list[MutableMapping[str, Any]]
) -> None:
    key = vault(database, OLD)
    db = await database.connect(**PATH)
    await add(database, OLD, name="other", types=["x.y"])
    await add(database, OLD, headers={"X-Api-Key": "hunter2"}, types=["a.b"])
    (intact,) = await findings_of(db, "altered secrets", vault=key)
    assert intact.severity is Severity.OK
    await fetchval(database, ALTERATIONS[alteration] + "WHERE " + OF_SHOP[alteration])
    # Doctor finds it by itself where it has the key, and otherwise by the journal.
    assert 'endpoint "shop": its ' in (await the_one(db, "altered secrets", vault=key)).message
    network = Network()
    async with running(database, network, key=OLD):
        await publish(database, 1)
        await until(lambda: fetchval(database, JOURNAL), what="the journal")
        # Each change of an endpoint lets the relay read the secrets again.
        await change_rate(database, "other")
        await until(lambda: len(errors(logs)) >= 2, what="the secret to be read again")
        (entry,) = await fetchval(database, JOURNAL)
        assert "is not what was encrypted for it: the table was changed" in entry
        found = await the_one(db, "altered secrets")
        assert found.severity is Severity.PROBLEM
        assert "outbox endpoint rotate-secret shop --overlap 0" in str(found.action)
        assert network.sent == []
        async with database.at_hand() as connection:
            await endpoint_changes.update_endpoint(
                connection,
                "relay",
                "shop",
                lambda s: EndpointSettings.from_dict({**s.to_dict(), "headers": {}}),
                actor="test",
                vault=key,
            )
            await endpoint_secrets.rotate_secret(
                connection, "relay", "shop", actor="test", overlap_s=0, vault=key
            )
        await all_ended(database)
    assert network.data() == [1]
    for options in ({}, {"vault": key}):
        (repaired,) = await findings_of(db, "altered secrets", **options)
        assert repaired.severity is Severity.OK


async def test_an_alarm_that_is_journalled_late_does_not_follow_the_repair(
    database: Database,
) -> None:
    """The relay read the secret before the operator set it again."""
    await add(database, OLD)
    await fetchval(database, ALTERATIONS["a changed byte"])
    version = await fetchval(database, "SELECT version FROM cursor")
    path = {"search_path": "relay"}
    db = await asyncpg.connect(database.dsn, connection_class=StoreConnection, server_settings=path)
    try:
        endpoint_id = await db.fetchval("SELECT id FROM endpoint")
        found = await read_endpoints(db, [endpoint_id], vault(database, OLD))
        assert [each.secret_altered for each in found] == [True]
        async with database.at_hand() as connection:
            await endpoint_secrets.rotate_secret(
                connection, "relay", "shop", actor="test", overlap_s=0, vault=vault(database, OLD)
            )
        await journal_altered_secrets(db, found, "relay", version)
        assert await fetchval(database, JOURNAL) is None
        current = await fetchval(database, "SELECT version FROM cursor")
        await journal_altered_secrets(db, found, "relay", current)
        assert len(await fetchval(database, JOURNAL)) == 1
    finally:
        await db.close()


async def change_rate(database: Database, name: str) -> None:
    """Change an endpoint, which raises the version that relays compare."""
    async with database.at_hand() as connection:
        await endpoint_changes.update_endpoint(
            connection,
            "relay",
            name,
            lambda s: EndpointSettings.from_dict({**s.to_dict(), "rate_per_s": 100.0}),
            actor="test",
            vault=vault(database, OLD),
        )


def errors(logs: list[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    return [each for each in logs if each["event"].startswith("an endpoint cannot be used")]


@pytest.mark.full
async def test_the_api_names_an_altered_secret_and_a_missing_key(
    database: Database, logs: list[MutableMapping[str, Any]]
) -> None:
    await add(database, OLD)
    token = await make_token(database, "ops")
    async with serving(database, key=NEW) as anybody:
        response = await anybody.with_token(token).post("/v1/endpoints/shop/test")
        assert (response.status, response.detail) == (503, KEY_MISSING)
    await fetchval(database, ALTERATIONS["a changed byte"])
    async with serving(database, key=OLD) as anybody:
        response = await anybody.with_token(token).post("/v1/endpoints/shop/test")
        assert response.status == 409
        assert response.json["type"] == "urn:outbox:problem:secret-altered"
        assert response.detail == (
            'endpoint "shop": its signing secret is not what was encrypted for it: '
            "the table was changed; set it again"
        )
        reported = (await anybody.with_token(token).get("/v1/doctor")).json["findings"]
    (found,) = (each for each in reported if each["check"] == "altered secrets")
    assert found["message"] == (
        'endpoint "shop": its signing secret is not what was encrypted for it: '
        "the table was changed; set it again"
    )
    assert not [each for each in logs if "unavailable" in each["event"]]
