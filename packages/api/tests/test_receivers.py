"""The listener for receivers: deliveries of one endpoint can be fetched again."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest

from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.endpoints import secrets as endpoint_secrets
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.tokens import fetch as fetch_tokens
from outbox.receiver import verify
from outbox_api import in_flight
from tests.support.detaching import ATTACH, DETACH
from tests.support.receivers_listener import listening, token_of
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    remove_events,
    running,
)
from tests.support.split_runs import split_runs

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database
    from tests.support.receivers_listener import Client

pytestmark = pytest.mark.system


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


async def test_deliveries_are_fetched_in_pages(database: Database, db: Connection[Any]) -> None:
    made = await add_endpoint(database)
    network = Network(lambda sent: REFUSED if sent.seq == 3 else OK)
    async with running(database, network):
        await publish(database, *range(1, 8), key="k")
        await all_ended(database)
    async with listening(database, await token_of(db)) as client:
        (lane,) = (await client.get("lanes"))["items"]
        assert (lane["acknowledged"], lane["last"], lane["ended"]) == (7, 7, False)
        after: int | None = 0
        items: list[Any] = []
        while after is not None:
            path = f"lanes/{lane['lane']}/deliveries"
            page = await client.get(path, after=after, limit=3)
            assert page["kept_from"] == after + 1
            items += page["items"]
            after = page["next"]
        assert (await client.get(path, after=7))["items"] == []
    assert [item.get("dead_lettered") for item in items] == [None, None, "refused", *[None] * 4]
    for item, sent in zip(items, network.sent, strict=True):
        verified = verify(item["headers"], item["body"].encode(), made.secret)
        assert item["body"].encode() == sent.request.body
        (message,) = verified.messages
        assert message.delivery_id == sent.delivery
        assert message.sequence == item["sequence"]


async def test_a_fetch_token_is_for_one_endpoint_and_can_be_revoked(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    await add_endpoint(database, "other")
    ours, theirs = await token_of(db), await token_of(db, "other")
    async with listening(database, ours) as client:
        (lane,) = (await client.get("lanes"))["items"]
        path = f"lanes/{lane['lane']}/deliveries"
        await client.get(path)
        client.token = theirs
        assert (await client.get(path, status=404))["type"].endswith("not-found")
        for client.token in ("", "x", "obx_" + "A" * 43, "obf_" + "A" * 43):
            reported = await client.get(path, status=401)
            assert "create one with outbox endpoint fetch-token" in reported["detail"]
        # A new one replaces it, at once or later.
        kept = await fetch_tokens.add_fetch_token(db, "relay", "shop", actor="test")
        newest = (await fetch_tokens.add_fetch_token(db, "relay", "shop", actor="test")).token
        for client.token in (ours, kept.token, newest):
            await client.get(path)
        client.token = await token_of(db)
        await client.get(path)
        for old in (ours, kept.token, newest):
            client.token = old
            await client.get(path, status=401)
        client.token = await token_of(db)
        done = await fetch_tokens.revoke_fetch_tokens(db, "relay", "shop", actor="test")
        assert done.revoked == 1
        await client.get(path, status=401)
        client.token = await token_of(db)
        await endpoint_removal.remove_endpoint(db, "relay", "shop", dead_letter=True, actor="test")
        async with running(database, Network()):
            pass
        await db.execute("UPDATE endpoint SET state = 'removed' WHERE name = 'shop'")
        await client.get(path, status=401)


async def test_anybody_may_read_from_where_deliveries_are_sent(database: Database) -> None:
    path, addresses = "/.well-known/outbox-egress.json", ["203.0.113.7/32", "2001:db8::/64"]
    async with listening(database, "", egress_addresses=addresses) as client:
        assert await client.get_at(path) == {"addresses": addresses}
    async with listening(database, "") as client:
        await client.get_at(path, status=404)


async def test_one_of_two_clocks_signs_what_a_receiver_accepts(
    database: Database, db: Connection[Any]
) -> None:
    """Nobody says which one is right; keys expire by the database's."""
    made = await add_endpoint(database)
    async with running(database, Network()):
        await publish(database, 1, 2, 3, key="k")
        await all_ended(database)
    rotated = await endpoint_secrets.rotate_secret(db, "relay", "shop", actor="test")
    wall_ahead_s = 2 * 86400.0
    async with listening(
        database, await token_of(db), lambda: time.time() + wall_ahead_s
    ) as client:
        (lane,) = (await client.get("lanes"))["items"]
        path = f"lanes/{lane['lane']}/deliveries/"
        # The receiver refuses the first one, and later, with another clock, the fourth one.
        items = [await client.get(f"{path}{n}") for n in (1, 1, 2, 3, 3)]
        wall_ahead_s = 0.0
        items.append(await client.get(f"{path}3"))
    ahead = [int(item["headers"]["webhook-timestamp"]) - time.time() for item in items]
    assert [round(each / 86400) for each in ahead] == [0, 2, 2, 2, 0, 0]
    for item, secret in itertools.product(items, (made.secret, rotated.secret)):
        at = int(item["headers"]["webhook-timestamp"])
        verify(item["headers"], item["body"].encode(), secret, now=at)


@pytest.mark.full
async def test_both_secrets_sign_during_rotation(database: Database, db: Connection[Any]) -> None:
    made = await add_endpoint(database)
    async with running(database, Network()):
        await publish(database, 1)
        await all_ended(database)
    rotated = await endpoint_secrets.rotate_secret(db, "relay", "shop", actor="test")
    async with listening(database, await token_of(db)) as client:
        (lane,) = (await client.get("lanes"))["items"]
        (item,) = (await client.get(f"lanes/{lane['lane']}/deliveries"))["items"]
    for secret in (made.secret, rotated.secret):
        verify(item["headers"], item["body"].encode(), secret)


async def test_an_event_without_payload_keeps_its_sequence_and_has_a_reason(
    database: Database, db: Connection[Any]
) -> None:
    """Erased with a record; missing without one; an error if it may be hidden."""
    await add_endpoint(database)
    async with running(database, Network()):
        await publish(database, 1, 2, 3, key="k")
        await all_ended(database)
    erase = "UPDATE outbox SET payload = NULL, erased_at = clock_timestamp() WHERE id = 1"
    await db.execute(erase)
    await remove_events(database, "id = 2")
    async with listening(database, await token_of(db)) as client:
        (lane,) = (await client.get("lanes"))["items"]
        path = f"lanes/{lane['lane']}/deliveries"
        first, second, third = (await client.get(path))["items"]
        assert first == {"sequence": 1, "previous_sequence": 0, "erased": True}
        assert second == {"sequence": 2, "previous_sequence": 1, "missing": True}
        assert await client.get(f"{path}/2") == second
        assert third["sequence"] == 3
        await db.execute(DETACH)
        problem = await client.get(path, status=503)
        assert problem["detail"] == "rows may be hidden from the API; see outbox doctor"
        await db.execute(ATTACH)
        assert (await client.get(path))["items"][2]["sequence"] == 3


@pytest.mark.full
async def test_deliveries_beyond_retention_are_reported(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    async with running(database, Network()):
        await publish(database, 1, 2, 3, key="k")
        await all_ended(database)
    await split_runs(db)
    await db.execute("DELETE FROM delivery_run WHERE seq <= 2")
    async with listening(database, await token_of(db)) as client:
        (lane,) = (await client.get("lanes"))["items"]
        page = await client.get(f"lanes/{lane['lane']}/deliveries")
        assert page["kept_from"] == 3
        assert [item["sequence"] for item in page["items"]] == [3]
        await db.execute("DELETE FROM delivery_run")
        page = await client.get(f"lanes/{lane['lane']}/deliveries")
        assert (page["kept_from"], page["items"], page["next"]) == (4, [], None)


async def test_an_invalid_fetch_request_is_rejected(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database)
    async with listening(database, await token_of(db)) as client:
        (lane,) = (await client.get("lanes"))["items"]
        path = f"lanes/{lane['lane']}/deliveries"
        for query in ({"after": "-1"}, {"after": "x"}, {"after": "9" * 30}, {"limit": "1001"}):
            reported = await client.get(path, status=422, **query)
            assert "\n" not in reported["detail"]
        await client.get("lanes/x/deliveries", status=404)
        await client.get("nothing", status=404)
        assert "GET" in (await _post(client, path))["detail"]


async def test_a_fetch_token_has_its_share_of_the_requests_in_progress(
    database: Database, db: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_endpoint(database)
    monkeypatch.setattr(in_flight, "TOKEN_REQUESTS_MAX", 0)
    async with listening(database, await token_of(db)) as client:
        refused = await client.get("lanes", status=429)
    assert refused["detail"].startswith("this endpoint has 0 requests in flight; ")


async def _post(client: Client, path: str) -> Any:
    async with client._session.put(f"{client.url}/v1/{path}") as response:
        assert response.status == 405
        return await response.json(content_type=None)


async def test_deliveries_of_a_paused_endpoint_can_be_fetched(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, lanes=2)
    async with running(database, Network()):
        await publish(database, 1, 2, 3, key="k")
        await all_ended(database)
        await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="test")
        await publish(database, 4, key="k")
    async with listening(database, await token_of(db)) as client:
        lanes = (await client.get("lanes"))["items"]
        assert sorted(lane["acknowledged"] for lane in lanes) == [0, 3]
        one = await client.get("lanes", limit=1)
        two = await client.get("lanes", limit=1, after=one["next"])
        assert [*one["items"], *two["items"]] == lanes
    used = await fetchval(database, "SELECT last_used_at IS NOT NULL FROM fetch_token")
    assert used
