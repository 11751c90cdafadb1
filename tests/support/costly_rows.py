"""The costliest rows that a tenant and its receivers can make the API return, of every kind."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.model import endpoint_config
from outbox.core.model.endpoint_settings import ENDPOINT_LANES_MAX
from outbox.core.model.event import KEY_BYTES_MAX, ONCE_BYTES_MAX, TENANT_BYTES_MAX
from outbox.core.model.pattern import TYPE_BYTES_MAX
from outbox.core.model.setting_types import NAME_BYTES_MAX
from outbox.core.model.stored_response import STORED_BODY_CHARS_MAX, STORED_HEADER_CHARS_MAX
from outbox.operations import quotas
from outbox.operations.endpoints.apply import apply_file
from outbox_api.limits import COMMENT_CHARS_MAX, LIMIT_MAX
from outbox_api.tenancy import stored_key

if TYPE_CHECKING:
    from tests.support.postgres import Database

ROWS = LIMIT_MAX + 100
"""Rows of each kind: a page and some more."""
TENANT, KEY = "x" * TENANT_BYTES_MAX, "k" * KEY_BYTES_MAX
ENDPOINT, SCHEDULE = "n" * (NAME_BYTES_MAX - 4) + "{:04}", "s" * 96 + "{:04}"
ONCE = "o" * (ONCE_BYTES_MAX - len(stored_key(TENANT, "")) - 4) + "{:04}"
CA = "-----BEGIN CERTIFICATE-----\n" + "A" * 65_000 + "\n-----END CERTIFICATE-----\n"
RESPONSE = {
    "status": 500,
    "elapsed_ms": 1.0,
    "headers": {f"x-{n}": "v" * STORED_HEADER_CHARS_MAX for n in range(16)},
    "body": "\N{FOX FACE}" * STORED_BODY_CHARS_MAX,
}
VALUES = {
    "tenant": f"'{TENANT}'",
    "type": f"'{'t' * TYPE_BYTES_MAX}'",
    "key": f"'{KEY}'",
    "once": f"'{stored_key(TENANT, ONCE[:-5])}'",
    "schedule": f"'{SCHEDULE[:-5]}'",
    "ca": f"$pem${CA}$pem$",
    "types": "ARRAY(SELECT repeat(chr(97 + n % 26), 250) || n FROM generate_series(1, 100) n)",
    "comment": f"repeat('\N{FOX FACE}', {COMMENT_CHARS_MAX})",
    "actor": "'token ' || repeat('a', 100)",
    "headers": f"'{orjson.dumps({f'X-{n}': 'h' * 100 for n in range(64)}).decode()}'::jsonb",
    "payload": "(SELECT jsonb_agg('[]'::jsonb) FROM generate_series(1, 50000))",
    "response": f"$json${orjson.dumps(RESPONSE).decode()}$json$::jsonb",
    "rows": str(ROWS),
}
MANY_SMALL_VALUES = {
    "ca": "NULL",
    "types": "ARRAY(SELECT chr(97 + n % 26) || n FROM generate_series(1, 100) n)",
    "comment": "NULL",
    "response": '\'{"status": 500, "elapsed_ms": 1.0}\'::jsonb',
}

# The schedule's expression fires on few days, and the search for them crosses decades.
FILL = """
UPDATE endpoint SET
    url = url || repeat('u', 2000), state_comment = :comment, state_by = :actor, types = :types,
    filter = '$.a == "' || repeat('f', 1000) || '"', ca = :ca, headers = :headers;
UPDATE endpoint_health SET last_response = :response;
UPDATE lane_progress SET last_response = :response, retry_seq = 1, attempts = 1;
UPDATE lane_counter SET last_seq = :rows, by_xid = txid_current();

INSERT INTO journal (kind, actor, endpoint_id, data)
SELECT kind, 'replica 1', id, jsonb_build_object(
           'name', name, 'last_response', :response, 'relay', 'r', 'replica', 1, 'epoch', 1)
  FROM endpoint, unnest('{endpoint_rejecting,endpoint_claimed}'::text[]) kind
 WHERE kind = 'endpoint_rejecting' OR name LIKE '%0000';
INSERT INTO journal (kind, actor, data)
SELECT 'dead_discarded', :actor,
       jsonb_build_object('dead', (SELECT jsonb_agg(n) FROM generate_series(1000000, 1010000) n))
  FROM generate_series(1, 10);

INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, event_id, tenant, type, key,
                         headers, payload, reason, attempts, last_response)
SELECT endpoint_id, id, 1, n, n, gen_random_uuid(), :tenant, :type, :key, :headers,
       CASE n WHEN 1 THEN :payload ELSE '{}' END, 'refused', 9, :response
  FROM (SELECT * FROM lane ORDER BY id LIMIT 2) lane, generate_series(1, 600) n;
INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, tenant, type, reason, state,
                         attempts)
SELECT endpoint_id, id, 1, 1000 + n, 1000 + n, :tenant, :type,
       ('{refused,exhausted,expired,erased,backlog,disabled,removed,skipped}'::text[])[1 + n % 8],
       CASE WHEN n < 7 THEN 'dead' ELSE 'discarded' END, 9
  FROM lane, generate_series(0, 13) n WHERE slot = 0;

INSERT INTO replay_job (kind, state, endpoint, types, tenant, reason, requested_by)
SELECT 'dead', 'done', repeat('e', 200), :types, :tenant, 'refused', :actor
  FROM generate_series(1, :rows);
INSERT INTO replay_job_endpoint (job_id, endpoint_id, first_id, next_id, last_id, expected)
SELECT j.id, e.id, 1, 1, 100, 100
  FROM replay_job j CROSS JOIN LATERAL (
       SELECT id FROM endpoint LIMIT CASE j.id WHEN 1 THEN NULL ELSE 1 END) e;
INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
SELECT 1, endpoint_id, id, 1, 1, 1 FROM dead_letter WHERE id = 1;

SELECT publish(type => :type, key => :key, tenant => :tenant, headers => :headers,
               payload => CASE WHEN n > :rows - 30 THEN :payload ELSE '{}' END,
               deliver_at => CASE WHEN n > :rows THEN now() + interval '1 day' END)
  FROM generate_series(1, :rows + 1) n;
INSERT INTO batch (batch, high, events, deliveries, lanes)
SELECT 1, :rows, :rows, 3000, ARRAY(SELECT id FROM lane ORDER BY id DESC LIMIT 100);
INSERT INTO delivery_run (lane_id, batch, seq, outbox_id)
SELECT lane, batch, n, n FROM batch, unnest(lanes) lane, generate_series(:rows - 29, :rows) n;
INSERT INTO attempt_run (lane_id, batch, seq, attempt, replica_id, outcome, status, started_at,
                         elapsed_ms, response)
SELECT lane_id, batch, seq, n, 1, 'r', 500, now(), 1.0, CASE WHEN n <= 10 THEN :response END
  FROM delivery, generate_series(1, CASE WHEN lane_id % 100 = 0 THEN 10000 ELSE 10 END) n
 WHERE seq = :rows;

INSERT INTO delivery_history (endpoint_id, slot, began_at, successes, failures, latencies)
SELECT id, i % 288, to_timestamp(i * 300), 10000000, 10000000, array_fill(1000000, ARRAY[13])
  FROM (SELECT floor(extract(epoch FROM now()) / 300)::bigint AS last) now,
       generate_series(last - 287, last) i,
       (SELECT '00000000-0000-0000-0000-000000000000'::uuid AS id UNION ALL
        (SELECT id FROM endpoint ORDER BY name COLLATE "C" LIMIT 100)) e;

INSERT INTO installation_history (slot, n, at, seconds, events, deliveries, completed, pending,
                                  batch, sequenced, acked)
SELECT n, n, now() - (359 - n) * interval '10 s', 10.0123456789, 123456789, 123456789, 123456789,
       123456789, 1, 0, 0
  FROM generate_series(0, 359) n;

INSERT INTO schedule (name, cron, timezone, type, key, tenant, payload, headers, misfire, grace_s,
                      overlap, state_by, state_comment, next_at, due_at)
SELECT :schedule || to_char(n, 'FM0000'), '* 3 * 2 MON#5', 'America/New_York', :type, :key,
       :tenant, CASE n WHEN 1 THEN :payload ELSE '{}' END, :headers, 'once', 1, 'allow', :actor,
       :comment, now(), now()
  FROM generate_series(1, :rows) n;
INSERT INTO idempotency_key (key, expires_at)
SELECT :once || to_char(n, 'FM0000'), 'infinity' FROM generate_series(1, :rows) n;
INSERT INTO token (name, hash, scopes, tenant, created_by)
SELECT repeat('t', 96) || to_char(n, 'FM0000'), sha256(n::text::bytea), '{read}', :tenant, :actor
  FROM generate_series(1, :rows) n;
INSERT INTO replica (label, name, version, lease_s, expires_at)
SELECT 'relay ' || n, repeat('r', 200), '1.0.0', 10, 'infinity' FROM generate_series(1, 20) n;
ANALYZE
"""


async def fill(database: Database, *, large: bool) -> None:
    """Fill all tables with rows of the tenant TENANT.

    Args:
        large: values have as many bytes as possible; otherwise rows have as many values.
    """
    values = VALUES if large else VALUES | MANY_SMALL_VALUES
    statements = re.sub(r"(?<!:):([a-z]+)\b", lambda each: values[each[1]], FILL)
    declared: list[dict[str, Any]] = [
        {"name": ENDPOINT.format(n), "url": "https://e.example/", "tenant": TENANT, "lanes": 1}
        for n in range(ROWS)
    ]
    declared[0]["lanes"] = ENDPOINT_LANES_MAX
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        parsed = endpoint_config.parse_file({"endpoints": declared})
        limits = {"endpoints": ROWS, "lanes": ROWS + ENDPOINT_LANES_MAX}
        await quotas.set_quota(connection, "relay", TENANT, limits, actor="ann")
        await apply_file(connection, "relay", parsed, actor="ann")
        await connection.execute(statements)
