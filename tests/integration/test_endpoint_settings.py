"""The settings of an endpoint appear in its requests."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from outbox.core.messages.signature import SignatureMismatch, parse_secret, verify
from outbox.core.model.response import AttemptResult
from outbox.receiver import BadMessage
from outbox.receiver import verify as verify_request
from tests.support.relay import (
    OK,
    QUICK_RETRY,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.costly


async def test_a_request_uses_the_method_headers_and_timeouts_of_its_endpoint(
    database: Database,
) -> None:
    await add_endpoint(database)
    await fetchval(
        database,
        """UPDATE endpoint SET method = 'PUT', connect_timeout_s = 1.5, timeout_s = 2.5,
                  headers = '{"X-Api-Key": "endpoint", "X-Team": "endpoint",
                             "X-Lane": "forged"}'""",
    )
    network = Network()
    async with running(database, network):
        headers = '{"x-team": "event", "X-Env": "event", "Cookie": "a", "Content-Length": "9"}'
        await publish(database, 1, headers=headers)
        await all_ended(database)
    (sent,) = network.sent
    request = sent.request
    recipient = request.recipient
    assert recipient.method == "PUT"
    assert (recipient.connect_timeout_s, recipient.timeout_s) == (1.5, 2.5)
    assert sent.headers["x-api-key"] == "endpoint"
    assert (sent.headers["x-team"], sent.headers["x-env"]) == ("endpoint", "event")
    assert sent.headers["x-lane"] == sent.body["lane"]
    assert not {"content-length", "cookie"} & sent.headers.keys()
    names = [name.lower() for name, _ in request.headers]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("batch_max", sampled([None, 5]))
async def test_the_headers_of_a_delivery_have_the_prefix_of_its_endpoint(
    database: Database, batch_max: int | None
) -> None:
    made = await add_endpoint(database, header_prefix="Acme-", batch_max=batch_max)
    network = Network()
    async with running(database, network):
        await publish(database, 1, headers='{"Acme-Sequence": "9", "Acme-Env": "test"}')
        await all_ended(database)
    (sent,) = network.sent
    assert sent.headers["acme-sequence"] == "1"
    assert sent.headers.get("acme-env") == ("test" if batch_max is None else None)
    assert not [name for name in sent.headers if name.startswith("x-")]
    verified = verify_request(
        sent.request.headers, sent.request.body, made.secret, header_prefix="Acme-"
    )
    assert [message.sequence for message in verified.messages] == [1]
    for prefixes, known in ((["X-", "Acme-"], True), (["X-"], False), (["Other-", "X-"], False)):
        with nullcontext() if known else pytest.raises(BadMessage, match="Delivery is not"):
            verify_request(
                sent.request.headers, sent.request.body, made.secret, header_prefix=prefixes
            )


@pytest.mark.full
async def test_an_endpoint_sets_its_own_retryable_status_codes(database: Database) -> None:
    await add_endpoint(database)
    await fetchval(database, "UPDATE endpoint SET retryable = '{404}'")
    responses = iter([AttemptResult.completed(404, 0.001), OK, AttemptResult.completed(503, 0.001)])
    network = Network(lambda _: next(responses))
    async with running(database, network):
        await publish(database, 1)
        await all_ended(database)
        await publish(database, 2)
        await all_ended(database)
    assert [sent.seq for sent in network.sent] == [1, 1, 2]
    assert await fetchval(database, "SELECT array_agg(seq) FROM dead_letter") == [2]


async def test_a_retry_policy_may_retry_refusals(database: Database) -> None:
    """A list of statuses has precedence."""
    policy = QUICK_RETRY | {"refusals": "retry"}
    await add_endpoint(database, "patient", retry=policy)
    await add_endpoint(database, "listed", retry=policy, retryable=["503"])
    network = Network(lambda sent: REFUSED if sent.attempt == 1 else OK)
    async with running(database, network):
        await publish(database, 1)
        await all_ended(database)
    assert [sent.url.rpartition("/")[2] for sent in network.accepted] == ["patient"]
    sql = "SELECT e.name FROM dead_letter d JOIN endpoint e ON e.id = d.endpoint_id"
    assert await fetchval(database, sql) == "listed"


async def test_a_replaced_secret_signs_until_it_expires(database: Database) -> None:
    old = parse_secret((await add_endpoint(database)).secret)
    text = "whsec_" + "A" * 43 + "="
    await fetchval(
        database,
        """INSERT INTO endpoint_secret (endpoint_id, id, secret) SELECT id, 2, $1 FROM endpoint""",
        text,
    )
    await fetchval(
        database,
        """UPDATE endpoint_secret SET expires_at = clock_timestamp() + interval '3 seconds'
            WHERE id = 1""",
    )
    network = Network()
    async with running(database, network):
        await publish(database, 1)
        await until(lambda: len(network.sent) == 1)

        async def one_signature() -> bool:
            await publish(database, 1)
            await all_ended(database)
            return " " not in network.sent[-1].headers["webhook-signature"]

        await until(one_signature, what="the old secret to end")
    first, last = network.sent[0], network.sent[-1]
    for secret, sent, signs in (
        (old, first, True),
        (parse_secret(text), first, True),
        (old, last, False),
        (parse_secret(text), last, True),
    ):
        assert _verifies(secret, sent) is signs


def _verifies(secret: bytes, sent: Sent) -> bool:
    try:
        verify(sent.headers, sent.request.body, [secret], time.time())
    except SignatureMismatch:
        return False
    return True
