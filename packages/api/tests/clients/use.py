"""Uses a client that openapi-python-client generated: python use.py URL TOKEN."""

from __future__ import annotations

import sys
from typing import TypeVar

from outbox_client import AuthenticatedClient
from outbox_client.api.dead_letters import get_dead_letters, post_dead_letters_replay
from outbox_client.api.endpoints import get_endpoints, patch_endpoints_name, post_endpoints
from outbox_client.api.events import get_events, post_events
from outbox_client.api.trace import get_trace_id
from outbox_client.models import (
    EndpointBody,
    ManyPublished,
    NewEndpointBody,
    NewEvent,
    NewEvents,
    Problem,
    Published,
    ReplayBody,
)

T = TypeVar("T")


def ok(response: T | Problem | None) -> T:
    """The response, which is not an error."""
    assert response is not None
    assert not isinstance(response, Problem), response
    return response


def main(url: str, token: str) -> None:
    with AuthenticatedClient(url, token, raise_on_unexpected_status=True) as client:
        body = NewEndpointBody(name="crm", url="https://crm.example/hooks", types=["customer.*"])
        made = ok(post_endpoints.sync(client=client, body=body))
        assert (made.name, made.secret.startswith("whsec_")) == ("crm", True)
        refused = post_endpoints.sync(client=client, body=body)
        assert isinstance(refused, Problem)
        assert (refused.status, refused.type_) == (409, "urn:outbox:problem:conflict")
        ok(patch_endpoints_name.sync("crm", client=client, body=EndpointBody(lanes=2, rate=None)))
        names = [each.name for each in ok(get_endpoints.sync(client=client, search="crm")).items]
        assert names == ["crm"], names

        new = NewEvent(type_="customer.added", key="customer-7", payload={"customer": 7})
        first = ok(post_events.sync(client=client, body=new, idempotency_key="added-7"))
        again = ok(post_events.sync(client=client, body=new, idempotency_key="added-7"))
        assert isinstance(first, Published)
        assert isinstance(again, Published)
        assert (first.already, again.already, again.id) == (False, True, first.id)
        many = [NewEvent(type_="customer.changed", key="customer-7") for _ in range(3)]
        several = ok(post_events.sync(client=client, body=NewEvents(events=many)))
        assert isinstance(several, ManyPublished)
        assert [each.already for each in several.events] == [False] * 3

        found = ok(get_events.sync(client=client, key="customer-7", deliveries=True))
        assert [each.type_ for each in found.items][-1] == "customer.added"
        assert len(found.items) == 4
        (traced,) = ok(get_trace_id.sync(str(first.id), client=client, payload=True)).events
        assert (traced.event.event_id, traced.event.payload) == (first.id, {"customer": 7})

        dead = ok(get_dead_letters.sync(client=client, endpoint="shop", limit=1)).items
        ids = [each.id for each in dead]
        counted = ok(
            post_dead_letters_replay.sync(client=client, body=ReplayBody(ids=ids, dry_run=True))
        )
        assert counted.replaying == 1, counted
        ok(post_dead_letters_replay.sync(client=client, body=ReplayBody(ids=ids, rate=10)))


main(*sys.argv[1:])
print("used")
