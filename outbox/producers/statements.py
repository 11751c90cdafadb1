"""SQL statements of the producer API.

They run on the application's connections, with its search path, codecs and transaction.  So
names are schema-qualified, parameters are text, numbers and arrays of them, results are numbers and
text, and each call sends one statement.
"""

from __future__ import annotations

import re
from functools import lru_cache

from outbox.core.model.sql_names import quote_ident

# Publishes one event.  The statement checks the payload size itself and returns it,
# because a CHECK violation would abort the caller's transaction.  The expiry is computed
# with the database's clock, which also decides whether it has passed; it counts from
# deliver_at for a delayed event.
PUBLISH = """
SELECT p.size, {schema}.payload_bytes_max() AS size_max,
       CASE WHEN p.size <= {schema}.payload_bytes_max() THEN CAST({schema}.publish(
           type => CAST(:type AS text), payload => p.payload, key => CAST(:key AS text),
           tenant => CAST(:tenant AS text), once => CAST(:once AS text),
           headers => CAST(CAST(:headers AS text) AS jsonb),
           claimed => CAST(:claimed AS boolean),
           once_for => make_interval(secs => CAST(:once_for_s AS float8)),
           deliver_at => p.deliver_at,
           expires_at => greatest(clock_timestamp(), p.deliver_at)
                         + make_interval(secs => CAST(:expires_in_s AS float8))) AS text) END
       AS event_id
  FROM (SELECT d.payload, d.deliver_at, octet_length(CAST(d.payload AS text)) AS size
          FROM (SELECT CAST(CAST(:payload AS text) AS jsonb) AS payload,
                       CAST(CAST(:deliver_at AS text) AS timestamptz) AS deliver_at OFFSET 0) d
        OFFSET 0) p
"""

# Publishes several events in their order; writes nothing if one payload is too large.
PUBLISH_MANY = """
SELECT p.size, p.n, {schema}.payload_bytes_max() AS size_max,
       CASE WHEN p.size <= {schema}.payload_bytes_max() THEN CAST({schema}.publish_many(
           types => CAST(:type AS text[]),
           payloads => CAST(CAST(:payload AS text[]) AS jsonb[]),
           keys => CAST(:key AS text[]), tenants => CAST(:tenant AS text[]),
           onces => CAST(:once AS text[]),
           headers => CAST(CAST(:headers AS text[]) AS jsonb[]),
           once_for => ARRAY(
               SELECT make_interval(secs => e.once_for_s)
                 FROM unnest(CAST(:once_for_s AS float8[])) WITH ORDINALITY AS e(once_for_s, n)
                ORDER BY e.n),
           deliver_at => CAST(CAST(:deliver_at AS text[]) AS timestamptz[]),
           digests => CAST(:digests AS bytea[]),
           expires_at => ARRAY(
               SELECT greatest(clock_timestamp(), e.deliver_at)
                      + make_interval(secs => e.expires_in_s)
                 FROM unnest(CAST(:expires_in_s AS float8[]),
                             CAST(CAST(:deliver_at AS text[]) AS timestamptz[]))
                      WITH ORDINALITY AS e(expires_in_s, deliver_at, n)
                ORDER BY e.n)) AS text[]) END
       AS event_ids
  FROM (SELECT octet_length(CAST(CAST(d.payload AS jsonb) AS text)) AS size, d.n
          FROM unnest(CAST(:payload AS text[])) WITH ORDINALITY AS d(payload, n)
         ORDER BY 1 DESC LIMIT 1) p
"""

# Claims an idempotency key; true if this transaction may publish for it.
CLAIM_ONCE = """
SELECT {schema}.claim_once(
           CAST(:once AS text), keep => make_interval(secs => CAST(:once_for_s AS float8)))
"""

# Releases an idempotency key; true if it was taken.
RESET_ONCE = "SELECT {schema}.reset_once(CAST(:once AS text))"

# Begin, commit and roll back: a savepoint inside the caller's transaction, or a transaction.
NESTED = (
    "SAVEPOINT outbox",
    "RELEASE SAVEPOINT outbox",
    ("ROLLBACK TO SAVEPOINT outbox", "RELEASE SAVEPOINT outbox"),
)
ALONE = ("BEGIN", "COMMIT", ("ROLLBACK",))

_PLAIN_NAME = re.compile(r"\w+", re.ASCII)


@lru_cache(maxsize=64)
def in_schema(statement: str, schema: str) -> str:
    """Insert the quoted schema name into a statement."""
    return statement.replace("{schema}", _identifier(schema))


def _identifier(name: str) -> str:
    """Quote a name, without the characters that mark parameters for some driver."""
    if _PLAIN_NAME.fullmatch(name):
        return quote_ident(name)
    escaped = "".join(f"\\+{ord(each):06x}" for each in name)
    return f'U&"{escaped}"'
