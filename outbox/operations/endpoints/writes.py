"""The statements that write endpoints, each for any number of them.

Endpoints are passed as one JSON array, whose objects have the table's columns; what depends on an
endpoint is then written from its row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model.endpoint_settings import SETTING_FIELDS
from outbox.store.change import document
from outbox.store.routing_change import NEXT_BATCH
from outbox.store.sql.expressions import CURRENT_XID
from outbox.store.sql.message import Private, WriteStatement

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from uuid import UUID

    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.store.change import Change

_COLUMNS = ", ".join(SETTING_FIELDS)
ADD_ENDPOINTS = WriteStatement(
    "add_endpoints",
    f"""
INSERT INTO endpoint (id, state_by, {_COLUMNS})
SELECT id, $2, {_COLUMNS} FROM jsonb_populate_recordset(NULL::endpoint, $1::text::jsonb)
""",  # noqa: S608 (constants only)
)

ADD_FIRST_SECRETS = WriteStatement(
    "add_first_secrets",
    """
INSERT INTO endpoint_secret (endpoint_id, id, secret, public_key)
SELECT id, 1, secret, public_key
  FROM jsonb_to_recordset($1::text::jsonb) AS e(id uuid, secret text, public_key text)
""",
)

ADD_HEALTH = WriteStatement(
    "add_health", "INSERT INTO endpoint_health (endpoint_id) SELECT unnest($1::uuid[])"
)

ADD_COMPAT_SECRETS = WriteStatement(
    "add_compat_secrets",
    """
INSERT INTO endpoint_secret (endpoint_id, id, secret, compat)
SELECT id, 2, compat_secret, true
  FROM jsonb_to_recordset($1::text::jsonb) AS e(id uuid, compat_secret text)
 WHERE compat_secret IS NOT NULL
""",
)

# Unowned: any replica can acquire it.
ADD_OWNERSHIP = WriteStatement("add_ownership", "SELECT add_ownership($1::uuid[])")

# Updates all settings; headers only if they are given, because a key rotation may encrypt them
# anew meanwhile.
UPDATE_ENDPOINTS = WriteStatement(
    "update_endpoints",
    f"""
UPDATE endpoint e
   SET {", ".join(f"{name} = n.{name}" for name in SETTING_FIELDS if name != "headers")},
       headers = coalesce(n.headers, e.headers)
  FROM jsonb_populate_recordset(NULL::endpoint, $1::text::jsonb) n WHERE e.id = n.id
""",  # noqa: S608 (constants only)
)

# Endpoints may swap names, so all renamed ones first get a placeholder.
FREE_NAMES = WriteStatement("free_names", "UPDATE endpoint SET name = id::text WHERE id = ANY ($1)")

BEGIN_GENERATION = WriteStatement(
    "begin_generation",
    "UPDATE endpoint SET generation = next_generation(generation) WHERE id = ANY ($1)",
)

# Adds the lanes of endpoints' current generation, with their counters and progress.  No delivery
# before the next batch can be pending, so reads skip older partitions.
#   owned: a relay that acquires the endpoint waits for this lock, so the epoch is still current
#     when the new lanes become visible.
ADD_LANES = WriteStatement(
    "add_lanes",
    f"""
WITH owned AS MATERIALIZED (SELECT * FROM lock_ownership($1::uuid[])),
added AS (
    INSERT INTO lane (endpoint_id, generation, slot)
    SELECT e.id, e.generation, slot
      FROM endpoint e CROSS JOIN generate_series(0, e.lanes - 1) AS slot
     WHERE e.id = ANY ($1::uuid[])
    RETURNING id, endpoint_id),
counted AS (
    INSERT INTO lane_counter (lane_id, by_xid) SELECT id, {CURRENT_XID} FROM added)
INSERT INTO lane_progress (lane_id, endpoint_id, floor_batch, epoch)
SELECT a.id, a.endpoint_id, {NEXT_BATCH}, o.epoch FROM added a JOIN owned o USING (endpoint_id)
""",  # noqa: S608 (constants only)
)

# A version of a subscription that no batch used is deleted: it would conflict with the next one.
DELETE_UNUSED_SUBSCRIPTIONS = WriteStatement(
    "delete_unused_subscriptions",
    f"DELETE FROM subscription WHERE endpoint_id = ANY ($1) AND from_batch = {NEXT_BATCH}",  # noqa: S608 (a constant only)
)

END_SUBSCRIPTIONS = WriteStatement(
    "end_subscriptions",
    f"""
UPDATE subscription SET to_batch = {NEXT_BATCH} WHERE endpoint_id = ANY ($1) AND to_batch IS NULL
""",  # noqa: S608 (a constant only)
)

# Ends feeds before they arrived; what is left stays with them.
STOP_FEEDS = WriteStatement(
    "stop_feeds",
    """
UPDATE feed SET ended_at = clock_timestamp(), end_reason = $2
 WHERE endpoint_id = ANY ($1) AND ended_at IS NULL
""",
)

# Goes on with feeds by the subscriptions that endpoints' settings describe now.
CHANGE_FEEDS = WriteStatement(
    "change_feeds",
    """
WITH changed AS (
    UPDATE feed SET ended_at = clock_timestamp(), end_reason = 'changed'
     WHERE endpoint_id = ANY ($1) AND ended_at IS NULL
    RETURNING *)
INSERT INTO feed (endpoint_id, from_batch, from_id, batch, outbox_id, seen, after_job, types,
                  tenant, all_tenants, filter)
SELECT e.id, f.batch, f.outbox_id, f.batch, f.outbox_id, f.seen, f.after_job, e.types, e.tenant,
       e.all_tenants, e.filter
  FROM changed f JOIN endpoint e ON e.id = f.endpoint_id
""",
)

# Begins a new version of the subscription that endpoints' settings describe.
BEGIN_SUBSCRIPTIONS = WriteStatement(
    "begin_subscriptions",
    f"""
INSERT INTO subscription (endpoint_id, from_batch, types, tenant, all_tenants, filter)
SELECT id, {NEXT_BATCH}, types, tenant, all_tenants, filter FROM endpoint WHERE id = ANY ($1)
""",  # noqa: S608 (constants only)
)

# Locks endpoints, and aborts if a state is not the planned one: an owner changes states, too.
# FOR NO KEY UPDATE: it does not exclude new dead letters, whose foreign key refers to the row.
REQUIRE_STATES = WriteStatement(
    "require_states",
    """
WITH found AS MATERIALIZED (
    SELECT id, state FROM endpoint WHERE id = ANY ($1::uuid[]) ORDER BY id FOR NO KEY UPDATE)
SELECT abort_unless(
    (SELECT count(*) FROM found JOIN unnest($1::uuid[], $2::text[]) AS planned(id, state)
                         USING (id, state)) = cardinality($1::uuid[]))
""",
)

SET_STATES = WriteStatement(
    "set_states",
    """
UPDATE endpoint SET state = $2, state_at = clock_timestamp(), state_by = $3, state_comment = $4
 WHERE id = ANY ($1)
""",
)


def add_endpoints(
    change: Change, rows: Collection[Mapping[str, Any]], *, early: bool = False
) -> None:
    """Add endpoints with their secrets and lanes, without subscriptions.

    Args:
        rows: the columns, and `secret`, `public_key` and `compat_secret`.
        early: before the cursor row is locked; the names must be free then.
    """
    write = change.write_early if early else change.write
    text, ids = _document(rows), [row["id"] for row in rows]
    if ids:
        _count(change, rows)
        write(ADD_ENDPOINTS, text, change.actor)
        write(ADD_FIRST_SECRETS, text)
        if any(row["compat_secret"] for row in rows):
            write(ADD_COMPAT_SECRETS, text)
        write(ADD_HEALTH, ids)
        write(ADD_OWNERSHIP, ids)
        write(ADD_LANES, ids)


def update_endpoints(
    change: Change,
    rows: Collection[Mapping[str, Any]],
    *,
    renamed: Collection[UUID],
    with_new_lanes: Collection[UUID],
) -> None:
    """Update the settings of endpoints.

    Args:
        rows: the columns; `headers` only where they change.
    """
    if len(renamed) > 1:
        change.write(FREE_NAMES, list(renamed))
    if rows:
        _count(change, rows)
        change.write(UPDATE_ENDPOINTS, _document(rows))
    begin_generations(change, with_new_lanes)


def begin_generations(change: Change, ids: Collection[UUID]) -> None:
    """Begin new lanes of endpoints.

    Existing lanes receive nothing from this batch on; the owner delivers the new ones when they are
    drained.
    """
    if ids:
        change.additions.renewed.update(ids)
        change.write(BEGIN_GENERATION, list(ids))
        change.write(ADD_LANES, list(ids))


def replace_subscriptions(change: Change, ids: Collection[UUID]) -> None:
    """Replace the subscriptions of endpoints by those that their settings describe."""
    if ids:
        change.write(DELETE_UNUSED_SUBSCRIPTIONS, list(ids))
        change.write(END_SUBSCRIPTIONS, list(ids))
        change.write(BEGIN_SUBSCRIPTIONS, list(ids))


def change_feeds(change: Change, ids: Collection[UUID]) -> None:
    """Feed endpoints by the subscriptions that their settings describe now."""
    if ids:
        change.write(CHANGE_FEEDS, list(ids))


def stop_subscriptions(change: Change, ids: Collection[UUID]) -> None:
    """End the subscriptions and feeds of endpoints."""
    change.write(END_SUBSCRIPTIONS, list(ids))
    change.write(STOP_FEEDS, list(ids), "removed")


def endpoint_columns(endpoint_id: UUID, settings: EndpointSettings) -> dict[str, Any]:
    """The columns of an endpoint's row, except its headers."""
    values = {name: getattr(settings, name) for name in SETTING_FIELDS if name != "headers"}
    compat = None if settings.compat is None else settings.compat.public()
    return {"id": endpoint_id, **values, "retry": settings.retry.to_dict(), "compat": compat}


def _count(change: Change, rows: Collection[Mapping[str, Any]]) -> None:
    change.additions.endpoints.update({r["id"]: (r["tenant"], r["lanes"]) for r in rows})


def _document(rows: Collection[Mapping[str, Any]]) -> Private:
    return Private(document(list(rows)))
