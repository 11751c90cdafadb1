"""`outbox endpoint test`: one delivery, outside of all lanes."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click
import orjson

from outbox.cli.common import database, json_option, run_async, settings_options
from outbox.cli.endpoint.group import command
from outbox.cli.output import emit_json, emit_pairs
from outbox.core import duration, retry
from outbox.core.answer import Verdict, classify, retry_after_s, summary
from outbox.core.headers import own
from outbox.core.request import Delivery, prepare
from outbox.core.statuses import GONE
from outbox.store import endpoints
from outbox.transport.egress import EgressPolicy
from outbox.transport.port import Request

if TYPE_CHECKING:
    from uuid import UUID

    from outbox.config import Settings
    from outbox.core.answer import Answer
    from outbox.core.endpoint import EndpointSettings

EXIT_REFUSED = 1
TYPE = "outbox.test"


@command.command(
    epilog="""\b
Examples:
  outbox endpoint test billing
  outbox endpoint test billing --json | jq .status
"""
)
@click.argument("name")
@json_option
@settings_options
@click.pass_context
def test(ctx: click.Context, settings: Settings, name: str, as_json: bool) -> None:
    """Send one signed test delivery, now and from this machine.

    It has the type outbox.test and a lane of its own, so it is not in anybody's
    way.  Says what came back, and what the relay would make of that.  Exit code
    1 unless the answer is 2xx.
    """

    async def go() -> Answer:
        # Imported here: no other command of these needs an HTTP client.
        from outbox.transport.client import AiohttpTransport

        async with database(settings) as connection:
            found = await endpoints.get(connection, settings.schema_name, name)
            keys = await endpoints.signing_secrets(connection, settings.schema_name, found.row.id)
        wanted = found.settings
        transport = AiohttpTransport(EgressPolicy(settings.allow_networks))
        try:
            answer = await transport.send(_request(found.row.id, wanted, keys))
        finally:
            await transport.aclose()
        outcome, meaning = _outcome(answer, wanted)
        told = summary(answer)
        if as_json:
            emit_json({"endpoint": name, "url": wanted.url, "outcome": outcome, **told})
        else:
            emit_pairs(
                [
                    ("sent", f"{wanted.method} {wanted.url}"),
                    ("answer", told.get("status") or told["failure"]),
                    ("detail", told.get("detail")),
                    ("time", f"{told['elapsed_ms']:.0f} ms"),
                    ("headers", told.get("headers")),
                    ("body", told.get("body")),
                    ("outcome", meaning),
                ]
            )
        return answer

    answer = run_async(go())
    if answer.status is None or not 200 <= answer.status <= 299:
        ctx.exit(EXIT_REFUSED)


def _request(endpoint_id: UUID, wanted: EndpointSettings, keys: tuple[bytes, ...]) -> Request:
    """A delivery like any other, but for its lane."""
    now = time.time()
    prepared = prepare(
        Delivery(
            endpoint_id=endpoint_id,
            lane=f"{endpoint_id.hex[:12]}-test-{secrets.token_hex(4)}",
            seq=1,
            batch=0,
            # No event has such an id, so no delivery has its X-Delivery.
            outbox_id=-secrets.randbits(62),
            event_id=uuid4(),
            type=TYPE,
            tenant=None,
            key=None,
            published_at=datetime.fromtimestamp(now, UTC),
            expires_at=None,
            payload=orjson.dumps({"test": True, "endpoint": wanted.name}),
            headers=None,
        ),
        previous_seq=0,
        lane_ends=True,
        endpoint_headers=own(wanted.headers),
    )
    return Request(
        url=wanted.url,
        headers=prepared.attempt(1, int(now), keys),
        body=prepared.body,
        connect_timeout_s=wanted.connect_timeout_s,
        total_timeout_s=wanted.total_timeout_s,
        method=wanted.method,
    )


def _outcome(answer: Answer, wanted: EndpointSettings) -> tuple[str, str]:
    """What the relay would make of it: in a word, and as a sentence."""
    verdict = classify(answer, maybe_sent_before=False, retryable=wanted.retryable_statuses)
    if verdict is Verdict.DELIVERED:
        return "delivered", "delivered"
    if verdict is Verdict.REFUSED:
        if answer.status == GONE:
            return "disabled", "a dead letter, and the endpoint would be disabled"
        return "dead_letter", "a dead letter at once"
    lo, hi = (duration.rounded(s) for s in wanted.retry.delay_bounds_s(1))
    wait = hi if lo == hi else f"{lo} to {hi}"
    text = f"tried again after {wait} ({retry.describe(wanted.retry)})"
    held_s: Any = retry_after_s(answer.headers, time.time())
    if held_s:
        text += f"; it asks to be left alone for {duration.rounded(held_s)}"
    return "retried", text
