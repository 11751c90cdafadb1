"""SQL statements of the producer API.

They run on the application's connections, with its search path, codecs and
transaction.  So names are schema-qualified, parameters are text, numbers and arrays
of them, and each call sends one statement.
"""

from __future__ import annotations

from functools import lru_cache

from outbox.core.model.sql_names import quote_ident

# Publishes one event.  The statement checks the payload size itself and returns it,
# because a CHECK violation would abort the caller's transaction.  The expiry is computed
# with the database's clock, which also decides whether it has passed; it counts from
# deliver_at for a delayed event.
PUBLISH = """
SELECT p.size, {schema}.payload_bytes_max() AS size_max,
       CASE WHEN p.size <= {schema}.payload_bytes_max() THEN {schema}.publish(
           type => $1::text, payload => p.payload, key => $3::text, tenant => $4::text,
           once => $5::text, headers => $7::text::jsonb, claimed => $8::boolean,
           once_for => make_interval(secs => $9::float8),
           deliver_at => $10::text::timestamptz,
           expires_at => greatest(clock_timestamp(), $10::text::timestamptz)
                         + make_interval(secs => $6::float8)) END::text
       AS event_id
  FROM (SELECT d.payload, octet_length(d.payload::text) AS size
          FROM (SELECT $2::text::jsonb AS payload OFFSET 0) d OFFSET 0) p
"""

# Publishes several events in their order; writes nothing if one payload is too large.
PUBLISH_MANY = """
SELECT p.size, p.n, {schema}.payload_bytes_max() AS size_max,
       CASE WHEN p.size <= {schema}.payload_bytes_max() THEN {schema}.publish_many(
           types => $1::text[], payloads => $2::text[]::jsonb[], keys => $3::text[],
           tenants => $4::text[], onces => $5::text[], headers => $7::text[]::jsonb[],
           once_for => ARRAY(
               SELECT make_interval(secs => e.once_for_s)
                 FROM unnest($8::float8[]) WITH ORDINALITY AS e(once_for_s, n)
                ORDER BY e.n),
           deliver_at => $9::text[]::timestamptz[], digests => $10::bytea[],
           expires_at => ARRAY(
               SELECT greatest(clock_timestamp(), e.deliver_at)
                      + make_interval(secs => e.expires_in_s)
                 FROM unnest($6::float8[], $9::text[]::timestamptz[])
                      WITH ORDINALITY AS e(expires_in_s, deliver_at, n)
                ORDER BY e.n))::text[] END
       AS event_ids
  FROM (SELECT octet_length(d.payload::jsonb::text) AS size, d.n
          FROM unnest($2::text[]) WITH ORDINALITY AS d(payload, n)
         ORDER BY 1 DESC LIMIT 1) p
"""

# Claims an idempotency key; true if this transaction may publish for it.
CLAIM_ONCE = """
SELECT {schema}.claim_once($1::text, keep => make_interval(secs => $2::float8))
"""

# Releases an idempotency key; true if it was taken.
RESET_ONCE = "SELECT {schema}.reset_once($1::text)"

# A savepoint inside the caller's transaction.
SAVEPOINT = "SAVEPOINT outbox"
RELEASE = "RELEASE SAVEPOINT outbox"
ROLL_BACK = "ROLLBACK TO SAVEPOINT outbox; RELEASE SAVEPOINT outbox"


@lru_cache(maxsize=64)
def in_schema(statement: str, schema: str) -> str:
    """Insert the quoted schema name into a statement."""
    return statement.format(schema=quote_ident(schema))
