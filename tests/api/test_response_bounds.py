"""What the response to one request costs the relay, over a database with costly data.

A tenant makes its own rows costly, within their limits: settings of endpoints, comments,
responses of its receivers.  Each GET operation of the OpenAPI document is walked page by page, with
the largest limit that it accepts.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson
import pytest

from outbox.api.openapi import document
from outbox.api.route import COMMENT_CHARS_MAX, LIMIT_MAX
from outbox.api.routes import ROUTES
from outbox.core.model import endpoint_config
from outbox.operations.apply import apply_file
from outbox.operations.page_bytes import PAGE_BYTES_MAX
from tests.support.api import make_token, serving
from tests.support.costs import (
    MEMORY_BYTES_MAX,
    PAUSE_S_MAX,
    connected_client,
    memory_bytes,
    only_on_linux,
    reset_peak,
)
from tests.support.relay import add_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.api import Api
    from tests.support.costs import Costs
    from tests.support.postgres import Database

ENDPOINTS = LIMIT_MAX + 100
PAGES_MAX = 3
"""Pages that are read of each listing: they are alike."""

# The largest values that the API and the relay store.
FILL = """
UPDATE endpoint SET
    url = url || repeat('u', 2000), state_comment = repeat('c', 1000),
    types = ARRAY(SELECT repeat(chr(97 + n % 26), CASE WHEN $1 THEN 250 ELSE 1 END) || n
                    FROM generate_series(1, 100) n),
    filter = '$.a == "' || repeat('f', 1000) || '"',
    ca = CASE WHEN $1 THEN $3 END,
    headers = (SELECT jsonb_object_agg('X-' || n, repeat('h', 100)) FROM generate_series(1, 64) n);
UPDATE endpoint_health SET last_response = $2;
UPDATE lane_progress SET last_response = $2, retry_seq = 1, attempts = 1;
UPDATE lane_counter SET last_seq = 1;
INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT 'endpoint_rejecting', 'replica 1', id, jsonb_build_object('name', name, 'last_response', $2)
  FROM endpoint;
INSERT INTO journal (kind, actor, data)
SELECT 'dead_discarded', 'ann',
       jsonb_build_object('dead', (SELECT jsonb_agg(n) FROM generate_series(1000000, 1010000) n))
  FROM generate_series(1, 200);
INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, event_id, type, key, payload,
                         reason, attempts, last_response)
SELECT l.endpoint_id, l.id, 1, n, n, gen_random_uuid(), repeat('t', 255), repeat('k', 512),
       (SELECT jsonb_agg('[]'::jsonb) FROM generate_series(1, 50000 / n)), 'refused', 9, $2
  FROM (SELECT * FROM lane ORDER BY id LIMIT 20) l, generate_series(1, 60) n;
SELECT publish(type => 'a.b', key => 'k', payload =>
               (SELECT jsonb_agg('[]'::jsonb) FROM generate_series(1, 50000)))
  FROM generate_series(1, 100);
INSERT INTO idempotency_key (key, expires_at)
SELECT repeat('k', 500) || n, 'infinity' FROM generate_series(1, 1100) n;
INSERT INTO token (name, hash, scopes, created_by)
SELECT repeat('t', 90) || n, sha256(n::text::bytea), '{read}', repeat('a', 200)
  FROM generate_series(1, 1100) n;
INSERT INTO replay_job (kind, state, endpoint, types, reason, requested_by)
SELECT 'dead', 'done', repeat('e', 200),
       ARRAY(SELECT repeat('t', 250) FROM generate_series(1, 100)), 'refused', repeat('a', 200)
  FROM generate_series(1, 1100)
"""
RESPONSE = {
    "status": 500,
    "elapsed_ms": 1.0,
    "headers": {f"x-{n}": "v" * 240 for n in range(64)},
    "body": "é" * 16 * 1024,
}
CA = "-----BEGIN CERTIFICATE-----\n" + "A" * 65_000 + "\n-----END CERTIFICATE-----\n"
PATHS = {
    "/v1/endpoints/{name}": "n0",
    "/v1/trace/{id}": "k",
    "/v1/schedules/{name}": "s0",
    "/v1/once/{key}": "k" * 500 + "1",
}
"""Values of path parameters; an id is 1."""


async def _fill(database: Database, *, large: bool) -> None:
    declared = [
        {"name": f"n{n}", "url": "https://e.example/", "lanes": 1024 if n == 0 else 1}
        for n in range(ENDPOINTS)
    ]
    texts = {
        "$1": str(large),
        "$3": f"$pem${CA}$pem$",
        "$2": f"$json${orjson.dumps(RESPONSE).decode()}$json$::jsonb",
    }
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        parsed = endpoint_config.parse_file({"endpoints": declared})
        await apply_file(connection, "relay", parsed, actor="ann")
        await connection.execute(re.sub(r"\$[123]\b", lambda each: texts[each[0]], FILL))
        await connection.execute("ANALYZE")


def _reads() -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and query of every GET operation, with the largest limits."""
    for path, methods in document(ROUTES)["paths"].items():
        for operation in (each for method, each in methods.items() if method == "get"):
            query = {}
            for each in operation.get("parameters", ()):
                if (
                    each["in"] == "query"
                    and "maximum" in each["schema"]
                    and each["name"] != "before"
                ):
                    query[each["name"]] = each["schema"]["maximum"]
                if each["name"] in ("payload", "revoked"):
                    query[each["name"]] = "true"
                if each["name"] == "state" and path == "/v1/dead-letters":
                    query[each["name"]] = "all"
            yield re.sub(r"{\w+}", quote(PATHS.get(path, "1")), path), query


async def test_a_page_of_large_settings_is_shorter_and_the_next_one_continues(
    database: Database, api: Api
) -> None:
    names = [f"n{n:02}" for n in range(40)]
    declared = [{"name": name, "url": "https://e.example/", "ca": CA} for name in names]
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        parsed = endpoint_config.parse_file({"endpoints": declared})
        await apply_file(connection, "relay", parsed, actor="ann")
    page = (await api.get("/v1/declaration", limit=LIMIT_MAX)).json
    assert page["next"] == page["items"][-1]["name"]
    assert abs(len(page["items"]) - PAGE_BYTES_MAX / len(CA)) < 1
    exported = await api.items("/v1/declaration", limit=LIMIT_MAX)
    assert [(each["name"], each["ca"]) for each in exported] == [(name, CA) for name in names]
    # The listing has no certificates.
    page = (await api.get("/v1/endpoints", limit=LIMIT_MAX)).json
    assert [each["name"] for each in page["items"]] == names
    assert page["next"] is None


async def test_a_comment_is_limited(database: Database, api: Api) -> None:
    await add_endpoint(database)
    path = "/v1/endpoints/shop/pause"
    refused = await api.post(path, {"comment": "c" * (COMMENT_CHARS_MAX + 1)})
    assert (refused.status, refused.detail[:8]) == (422, "comment:")
    assert (await api.post(path, {"comment": "c" * COMMENT_CHARS_MAX})).status == 200


@pytest.mark.one_major
@only_on_linux
@pytest.mark.parametrize("large", [True, False], ids=["large settings", "many settings"])
async def test_no_response_pauses_the_relay_or_fills_its_memory(
    database: Database, costs: Costs, large: bool
) -> None:
    await _fill(database, large=large)
    token = await make_token(database)
    async with serving(database, api_rate_max=100_000.0) as api:
        peaks, walked = await asyncio.to_thread(_walk, api.url, token, costs)
    most = sorted(peaks.items(), key=lambda each: -each[1])[:5]
    print(f"{len(peaks)} requests; longest pauses: {costs.worst()}; most memory: {most}")
    assert costs.worst(1)[0][1] < PAUSE_S_MAX, costs.worst()
    assert most[0][1] < MEMORY_BYTES_MAX, most
    assert {"/v1/endpoints", "/v1/declaration", "/v1/journal"} <= walked


def _walk(url: str, token: str, costs: Costs) -> tuple[dict[str, int], set[str]]:
    """Read everything; the memory that each response took, and the listings with a next page."""
    peaks: dict[str, int] = {}
    walked: set[str] = set()
    for path, query in _reads():
        for _ in range(PAGES_MAX):
            named = "&".join(f"{name}={quote(str(value))}" for name, value in query.items())
            name = f"{path}?{named}"[:80]
            pauses: list[float] = []
            # As in the walk of bodies: the least of some tries counts.
            while not pauses or (min(pauses) > PAUSE_S_MAX and len(pauses) < 3):
                before = reset_peak()
                costs.longest_s = 0.0
                with connected_client(url) as client:
                    headers = {"Authorization": f"Bearer {token}"}
                    client.request("GET", f"{path}?{named}", headers=headers)
                    response = client.getresponse()
                    body = response.read()
                pauses.append(costs.longest_s)
                peaks[name] = max(peaks.get(name, 0), memory_bytes("VmHWM") - before)
                assert response.status in (200, 404), (name, response.status, body[:500])
            costs.pauses[name] = min(pauses)
            following = orjson.loads(body).get("next")
            if following is None:
                break
            walked.add(path)
            query["after"] = following
    return peaks, walked
