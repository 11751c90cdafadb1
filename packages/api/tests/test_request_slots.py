"""What is in progress at a time: requests and bodies of one token, and of one address."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from outbox.web.address import parse_address
from outbox_api.problem import Problem
from outbox_api.request_slots import ADDRESS, MIB, TOKEN, RequestSlots
from tests.support.api import make_token
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Database


def refusal(slots: RequestSlots, token: int, address: str, body_bytes: int = 0) -> str | None:
    try:
        with slots.hold(token, address, body_bytes):
            return None
    except Problem as problem:
        return problem.detail


def test_a_token_has_its_share_of_the_requests() -> None:
    slots = RequestSlots()
    with ExitStack() as stack:
        for _ in range(TOKEN.requests):
            stack.enter_context(slots.hold(1, "192.0.2.1"))
        assert refusal(slots, 1, "192.0.2.1") == (
            "this token has 64 requests in progress; wait for their responses; retry in 1 s"
        )
        assert refusal(slots, 2, "192.0.2.1") is None
    assert refusal(slots, 1, "192.0.2.1") is None


def test_an_address_has_its_share_whatever_its_tokens() -> None:
    slots = RequestSlots()
    with ExitStack() as stack:
        for n in range(ADDRESS.requests):
            stack.enter_context(slots.hold(n, f"2001:db8::{n:x}"))
        problem = refusal(slots, 999, "2001:db8::ffff")
        assert problem is not None
        assert problem.startswith("this address has 256 requests in progress")
        assert refusal(slots, 999, "2001:db8:0:1::1") is None


def test_bodies_are_counted_by_their_bytes() -> None:
    slots = RequestSlots()
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(slots.hold(1, "192.0.2.1", MIB))
        problem = refusal(slots, 1, "192.0.2.1", 1)
        assert problem is not None
        assert problem.startswith("this token sends 2 MiB of bodies")
        # A request without a body is none of it.
        assert refusal(slots, 1, "192.0.2.1") is None
        assert refusal(slots, 2, "192.0.2.1", 8 * MIB) is None
    assert refusal(slots, 1, "192.0.2.1", 8 * MIB) is None


@pytest.mark.full
async def test_six_hundred_dripping_bodies_of_a_valid_token_do_not_keep_others_out(
    database: Database, client: Api
) -> None:
    hostile = await make_token(database, "hostile", ("publish",), tenant="acme")
    head = (
        f"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {hostile}\r\n"
        "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    ).encode()
    at = parse_address(client.url.removeprefix("http://"))
    user = client.with_token(await make_token(database, "user"))
    writers: list[asyncio.StreamWriter] = []
    statuses: Counter[bytes] = Counter()

    async def drip() -> None:
        reader, writer = await asyncio.open_connection(at.host, at.port)
        writers.append(writer)
        writer.write(head)
        statuses[(await reader.readline())[9:12]] += 1

    try:
        async with asyncio.TaskGroup() as group:
            drips = [group.create_task(drip()) for _ in range(600)]
            await until(lambda: statuses.total() >= 600 - TOKEN.requests, 20, "the refusals")
            event = {"type": "a.b", "payload": "x" * 50_000}
            for _ in range(20):
                assert (await user.get("/v1/me")).status == 200
                assert (await user.post("/v1/events", event)).status == 201
            for each in drips:
                each.cancel()
    finally:
        for writer in writers:
            writer.close()
    # Some were closed at the limit of connections, and the others were refused.
    assert set(statuses) <= {b"429", b""}
    assert statuses[b"429"] > 100
