"""Output of `outbox trace`."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from outbox.core.model.response import AttemptResult
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    Sent,
    add_endpoint,
    all_ended,
    publish,
    running,
)

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


def script(sent: Sent) -> AttemptResult:
    """`shop` succeeds at the third attempt; `audit` rejects every delivery."""
    if sent.url.endswith("audit"):
        return REFUSED
    headers = (("X-Request-Id", f"r-{sent.attempt}"),)
    if sent.attempt < 3:
        return AttemptResult.completed(503, 0.012, headers=headers, body=b"try\x1b[31m later\n")
    return OK


@pytest.fixture
def traced(database: Database) -> Database:
    """Publish two events of an order: `shop` accepts them, `audit` rejects them."""

    async def query_database() -> None:
        await add_endpoint(database)
        await add_endpoint(database, "audit")
        await add_endpoint(database, "billing", types=["invoice.*"])
        async with running(database, Network(script)):
            await publish(database, {"order": 17}, {"paid": True}, key="order-17")
            await all_ended(database)

    with capture_logs():
        asyncio.run(query_database())
    return database


def test_a_held_event_is_shown_with_its_place(outbox: Command, database: Database) -> None:
    async def hold() -> list[UUID]:
        async with database.connection(server_settings={"search_path": "relay"}) as db:
            ids: list[UUID] = await db.fetchval(
                """SELECT (publish_shared(tenant => 'acme', passes => false, costs => '{3,2}',
                                          held_max => 100, types => '{a.b,a.b}',
                                          payloads => '{1,2}', keys => '{k,k}')).event_ids"""
            )
            return ids

    _, second = asyncio.run(hold())
    result = outbox("trace", str(second), OUTBOX_DSN=database.dsn)
    assert result.code == 0
    assert re.search(r"^deliveries ahead +3$", result.out, re.MULTILINE)
    text = " ".join(result.out.split())
    assert "it is held for the share of the tenant acme since 20" in text
    assert "3 deliveries of the tenant are before it, at most 5000 a second" in text
    result = outbox("status", OUTBOX_DSN=database.dsn)
    held = r"^held +2 events with 5 deliveries, for the shares of 1 tenant, the oldest for \d+"
    assert re.search(held, result.out, re.MULTILINE)


def test_a_trace_as_text(outbox: Command, traced: Database) -> None:
    result = outbox("trace", "order-17", "--limit", "1", OUTBOX_DSN=traced.dsn)
    assert result.code == 0
    assert result.err == "outbox: warning: older events exist; next page: --before 2\n"
    event, audit, shop, reason = result.out.split("\n\n")
    pairs = dict(re.split(r"  +", line, maxsplit=1) for line in event.splitlines())
    assert UUID(pairs.pop("event"))
    assert re.fullmatch(r"\+[0-9.]+ m?s in batch \d", pairs.pop("sequenced"))
    assert re.fullmatch(r"20\d\d-.*", pairs.pop("published"))
    assert pairs == {
        "found by": "key",
        "outbox id": "2",
        "type": "a.b",
        "key": "order-17",
        "payload": "14 bytes",
        "not sent to": "1 not subscribed to its type (billing)",
    }
    assert _lines(audit) == [
        "audit  dead  sequence 2 of lane LANE-1-0  X-Delivery UUID",
        "sequenced",
        "attempt 1  400 after 1.0 ms  no",
        "dead-lettered (refused) as dead letter 2",
    ]
    assert _lines(shop) == [
        "shop  delivered  sequence 2 of lane LANE-1-0  X-Delivery UUID",
        "sequenced",
        "attempt 1  503 after 12 ms  x-request-id r-1  try\ufffd[31m later",
        "attempt 2  503 after 12 ms  x-request-id r-2  try\ufffd[31m later",
        "attempt 3  204 after 1.0 ms",
    ]
    assert _lines(reason) == [
        "why it is not delivered",
        "- audit: sequence 2 of lane LANE-1-0 was dead-lettered because its receiver refused it; "
        "it is dead letter 2: outbox dead replay 2",
    ]


def _lines(block: str) -> list[str]:
    """The lines without values that differ between runs."""
    block = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", block)
    block = re.sub(r"[0-9a-f]{12}-1-0", "LANE-1-0", block)
    return [re.sub(r"^ *(\+[0-9.]+ m?s  )?", "", line) for line in block.splitlines()]


def test_a_trace_as_json(outbox: Command, traced: Database) -> None:
    reported = outbox("trace", "order-17", "--payload", "--json", OUTBOX_DSN=traced.dsn).json
    assert (reported["version"], reported["found_by"], reported["more"]) == (1, "key", False)
    newest, oldest = reported["events"]
    assert (newest["event"]["payload"], oldest["event"]["payload"]) == (
        {"paid": True},
        {"order": 17},
    )
    audit, shop = newest["deliveries"]
    assert (audit["state"], audit["dead_letter"]["reason"]) == ("dead", "refused")
    assert (shop["state"], shop["dead_letter"], shop["lane_state"]) == ("delivered", None, None)
    assert [a["status"] for a in shop["attempts"]] == [503, 503, 204]
    assert shop["attempts"][0]["response"]["headers"] == {"x-request-id": "r-1"}
    assert newest["missed"] == [{"reason": "type", "endpoints": 1, "examples": ["billing"]}]
    assert len(newest["diagnosis"]) == 1


@pytest.mark.full
def test_a_trace_of_one_endpoint(outbox: Command, traced: Database) -> None:
    def trace_endpoint(endpoint: str) -> Any:
        dsn = {"OUTBOX_DSN": traced.dsn}
        reported = outbox("trace", "order-17", "--endpoint", endpoint, "--json", **dsn).json
        return reported["events"][0]

    assert [d["endpoint"] for d in trace_endpoint("shop")["deliveries"]] == ["shop"]
    assert trace_endpoint("shop")["diagnosis"] == []
    assert trace_endpoint("billing")["diagnosis"] == [
        "no endpoint received it: 1 not subscribed to its type (billing)"
    ]


def test_an_unknown_event_is_reported(here: Command) -> None:
    result = here("trace", "order-18")
    assert result.code == 2
    assert result.error.startswith('no event found for "order-18": ')
    assert here("trace", "x", "--endpoint", "nobody").error.startswith("there is no endpoint")
    assert here("trace", "\x1b[2J").error.count("\x1b") == 0
