"""Running relays sign with given secrets, and in the form of another sender."""

from __future__ import annotations

import hmac
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.messages.signature import SignatureMismatch, format_secret, parse_secret, verify
from outbox.core.model.secret_text import GivenSecret
from outbox.errors import CannotRun
from outbox.operations.endpoints.secrets import rotate_secret
from outbox.operations.preview import MASKED, preview_request
from outbox.store.connection.secrets import CLEAR
from outbox.store.delivery.endpoints import find_endpoint
from tests.support.relay import (
    Network,
    Sent,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

HUB = {"preset": "github", "secret": "hub-4711"}


def of_hub(sent: Sent, secret: str = "hub-4711") -> bool:  # noqa: S107
    digest = hmac.new(secret.encode(), sent.request.body, sha256).hexdigest()
    return sent.headers.get("x-hub-signature-256") == f"sha256={digest}"


def verifies(sent: Sent, secret: str) -> bool:
    try:
        verify(sent.headers, sent.request.body, [parse_secret(secret)], time.time())
    except SignatureMismatch:
        return False
    return True


@pytest.mark.parametrize("settings", [{"format": "raw"}, {"batch_max": 10}], ids=["raw", "batch"])
async def test_requests_carry_both_signatures(database: Database, settings: dict[str, Any]) -> None:
    made = await add_endpoint(database, compat=HUB, **settings)
    network = Network()
    async with running(database, network):
        await publish(database, *range(3), headers='{"X-Hub-Signature-256": "forged"}')
        await all_ended(database)
    assert network.sent
    for sent in network.sent:
        assert of_hub(sent)
        assert verifies(sent, made.secret or "")


async def test_a_running_relay_signs_with_a_secret_that_is_given(database: Database) -> None:
    made = await add_endpoint(database, compat=HUB)
    network, given = Network(), format_secret(bytes(range(32)))

    async def sent_now() -> Sent:
        await publish(database, 1)
        await all_ended(database)
        return network.sent[-1]

    async with running(database, network):
        before = await sent_now()
        async with database.at_hand() as db:
            await rotate_secret(db, "relay", "shop", actor="ann", given=GivenSecret(given))
            await rotate_secret(
                db, "relay", "shop", actor="ann", given=GivenSecret("new"), compat=True,
                overlap_s=0,
            )  # fmt: skip

        async def signs_with_the_new_ones() -> bool:
            sent = await sent_now()
            return verifies(sent, given) and of_hub(sent, "new")

        await until(signs_with_the_new_ones, what="the new secrets to sign")
    assert of_hub(before)
    assert not verifies(before, given)
    # The old signing secret signs as well, and the old compat secret does not.
    assert verifies(network.sent[-1], made.secret or "")
    assert not of_hub(network.sent[-1])


async def test_the_second_signature_ends(database: Database) -> None:
    made = await add_endpoint(database, compat=HUB)
    ended = '{"preset": "github", "until": "2001-01-31T00:00:00Z"}'
    await fetchval(database, "UPDATE endpoint SET compat = $1::text::jsonb", ended)
    network = Network()
    async with running(database, network):
        await publish(database, 1)
        await all_ended(database)
    (sent,) = network.sent
    assert "x-hub-signature-256" not in sent.headers
    assert verifies(sent, made.secret or "")


async def test_a_preview_masks_the_signature(database: Database) -> None:
    await add_endpoint(database, compat=HUB)
    await publish(database, 1)
    event = await fetchval(database, "SELECT event_id::text FROM outbox")
    async with database.at_hand() as db:
        shown = await preview_request(db, "relay", "shop", event, vault=CLEAR, now=time.time())
    headers = dict(shown.headers)
    assert headers["X-Hub-Signature-256"] == headers["webhook-signature"] == MASKED


async def test_without_its_secret_a_compat_signature_makes_the_endpoint_unusable(
    database: Database,
) -> None:
    await add_endpoint(database, compat=HUB)
    await fetchval(database, "DELETE FROM endpoint_secret WHERE compat")
    async with database.at_hand() as db:
        with pytest.raises(CannotRun, match="compat: there is no valid secret"):
            await find_endpoint(db, "relay", "shop", CLEAR)
