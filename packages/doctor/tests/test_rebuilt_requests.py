"""Requests as they are rebuilt for the log: what the receiver got, without its signature."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.compat import CompatSetting
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.events.erase import ErasureTarget, erase_events
from outbox.operations.preview import MASKED
from outbox.store.connection.secrets import CLEAR
from outbox_doctor.trace.queries import trace_delivery
from outbox_doctor.trace.rebuilt_requests import add_requests
from tests.support.relay import (
    BUSY,
    OK,
    Network,
    add_endpoint,
    all_ended,
    owned_endpoint,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from outbox_doctor.trace.model import RebuiltRequest
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

SIGNATURES = {
    "webhook-signature", "webhook-metadata-signature", "svix-signature", "x-acme-signature",
}  # fmt: skip
CHANGES: tuple[dict[str, Any], ...] = (
    {"format": "cloudevents", "source": "/shop"},
    {"format": "raw", "header_prefix": "X-Acme-", "headers": {"Authorization": "Bearer two"}},
    {"format": "cloudevents-binary", "headers": {}, "method": "PUT"},
    {"format": "envelope", "batch_max": 10, "url": "http://receiver.test/other"},
    {"batch_max": None, "format": "thin"},
)


async def rebuilt(database: Database, delivery: str) -> RebuiltRequest | None:
    async with database.at_hand() as db:
        trace = await trace_delivery(db, "relay", delivery)
        (found,) = (await add_requests(db, "relay", trace, vault=CLEAR)).deliveries
        return found.request


def seen(sent: Sent, own: set[str]) -> dict[str, str]:
    """The headers that a receiver saw, as the log shows them."""
    return {
        name.lower(): MASKED if name.lower() in own else value
        for name, value in sent.request.headers
        if name.lower() not in SIGNATURES
    }


async def test_a_rebuilt_request_is_what_the_receiver_got(database: Database) -> None:
    """With each set of settings, also after they were changed again, and of a later attempt."""
    await add_endpoint(database, headers={"Authorization": "Bearer one", "X-Team": "a"})
    network = Network(lambda sent: BUSY if sent.attempt < 2 else OK)
    owns: list[set[str]] = [{"authorization", "x-team"}]
    async with running(database, network) as worker:
        await publish(database, {"n": 0}, key="a", headers='{"X-From": "app"}')
        await until(lambda: len(network.accepted) == 1)
        for n, changes in enumerate(CHANGES, start=1):
            async with database.at_hand() as db:
                await endpoint_changes.update_endpoint(
                    db, "relay", "shop", lambda old, new=changes: replace(old, **new), actor="ann"
                )
            headers = changes.get("headers")
            owns.append(owns[-1] if headers is None else {each.lower() for each in headers})
            await until(
                lambda new=changes: owned_endpoint(worker).endpoint.format == new["format"],
                what="the relay to have the settings",
            )
            await publish(database, {"n": n}, key="a", headers='{"X-From": "app"}')
            await until(lambda n=n: len(network.accepted) == n + 1)
        await all_ended(database)

    for sent, own in zip(network.accepted, owns, strict=True):
        found = await rebuilt(database, sent.delivery)
        assert found is not None
        assert found.rebuilt
        assert (found.attempt, found.url) == (sent.attempt, sent.url)
        assert found.method == sent.request.recipient.method
        assert {name.lower(): value for name, value in found.headers} == seen(sent, own)
        assert (found.body or "").encode() == sent.request.body
        assert "Bearer" not in str(found)


SVIX = {"preset": "svix", "secret": "whsec_MTIz", "until": "2199-01-31"}
ACME = {
    "preset": "custom", "header": "X-Acme-Signature", "content": "{id} {body}",
    "headers": {"X-Acme-Id": "id = {id}"}, "secret": "x",
}  # fmt: skip


async def test_headers_of_a_compat_signature_are_rebuilt_without_it(database: Database) -> None:
    """Of the former settings, also when their secrets are deleted."""
    await add_endpoint(database, compat=SVIX)
    network = Network()
    forged = '{"svix-id": "forged", "X-Acme-Id": "of the event"}'
    async with running(database, network) as worker:
        for n, given in enumerate((ACME, None, {"preset": "github", "secret": "x"}), start=1):
            await publish(database, {"n": n}, key="a", headers=forged)
            await until(lambda n=n: len(network.accepted) == n)
            compat = None if given is None else CompatSetting().parse("compat", given)
            async with database.at_hand() as db:
                await endpoint_changes.update_endpoint(
                    db, "relay", "shop", lambda old, new=compat: replace(old, compat=new),
                    actor="ann",
                )  # fmt: skip
            await until(
                lambda new=compat: owned_endpoint(worker).endpoint.compat == new,
                what="the relay to have the settings",
            )
        await all_ended(database)

    svix, acme, none = (seen(sent, set()) for sent in network.accepted)
    assert svix["svix-id"] == svix["webhook-id"]
    assert acme["x-acme-id"] == f"id = {acme['webhook-id']}"
    assert none["svix-id"] == "forged"
    for sent, expected in zip(network.accepted, (svix, acme, none), strict=True):
        found = await rebuilt(database, sent.delivery)
        assert found is not None
        assert {name.lower(): value for name, value in found.headers} == expected


async def test_a_compat_signature_that_had_ended_is_not_rebuilt(database: Database) -> None:
    await add_endpoint(database, compat=SVIX)
    async with database.at_hand() as db:
        await db.execute(
            """UPDATE endpoint SET compat = '{"preset": "svix", "until": "2001-01-31T00:00:00Z"}'"""
        )
    network = Network()
    async with running(database, network):
        await publish(database, 1, headers='{"svix-id": "forged"}')
        await all_ended(database)
    (sent,) = network.accepted
    found = await rebuilt(database, sent.delivery)
    assert found is not None
    assert {name.lower(): value for name, value in found.headers} == seen(sent, set())
    assert not any("svix" in name for name, _ in found.headers)


async def test_what_is_gone_is_not_rebuilt(database: Database) -> None:
    await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, "secret", key="a")
        await publish(database, "other", key="b")
        await all_ended(database)
    first, second = (sent.delivery for sent in network.accepted)
    db = await database.connect(server_settings={"search_path": "relay"})
    await erase_events(db, "relay", ErasureTarget(key="a"), actor="ann")
    assert await rebuilt(database, first) is None
    assert await rebuilt(database, second) is not None
