"""SQL statements of the producer API.

They run on the application's connections, with its search path, codecs and transaction.  So
names are schema-qualified, parameters are text, bytes, numbers and arrays of them, results are
numbers and text, and each call sends one statement.
"""

from __future__ import annotations

import re
from functools import lru_cache

from outbox.core.model.sql_names import quote_ident

# Publishes one event; see schema/0016_values.sql.
_PUBLISH = "SELECT {schema}.publish_checked({arguments})"
_PUBLISH_TYPES = {
    "type": "text",
    "payload": "text",
    "key": "text",
    "tenant": "text",
    "once": "text",
    "headers": "text",
    "deliver_at": "text",
    "expires_in_s": "float8",
    "once_for_s": "float8",
    "claimed": "boolean",
}

# The same with a payload that is not JSON; see schema/0016_values.sql.
#   given: the parameters that occur twice, once: some drivers send each occurrence.
PUBLISH_BODY = """
SELECT CASE WHEN octet_length(given.body) > {schema}.payload_bytes_max()
            THEN ARRAY[NULL, CAST(octet_length(given.body) AS text),
                       CAST({schema}.payload_bytes_max() AS text)]
            ELSE ARRAY[CAST({schema}.publish_event(
                     type => CAST(:type AS text), body => given.body,
                     content_type => CAST(:content_type AS text), key => CAST(:key AS text),
                     tenant => CAST(:tenant AS text), once => CAST(:once AS text),
                     expires_at => greatest(clock_timestamp(), given.deliver_at)
                         + make_interval(secs => CAST(:expires_in_s AS float8)),
                     headers => CAST(:headers AS jsonb), deliver_at => given.deliver_at,
                     claimed => CAST(:claimed AS boolean),
                     once_for => make_interval(secs => CAST(:once_for_s AS float8))) AS text)] END
  FROM (SELECT CAST(:body AS bytea) AS body,
               CAST(CAST(:deliver_at AS text) AS timestamptz) AS deliver_at) given
"""

# Publishes several events in their order; writes nothing if one payload is too large.  The events
# are one JSON text in UTF-8: drivers encode arrays of text slowly.  A payload of null is not an
# SQL NULL; bodies are in Base64.
#   event: one row for each; MATERIALIZED, so that the text is parsed once.
_SEVERAL = """
WITH event AS MATERIALIZED (
    SELECT e.n, e.type, CASE WHEN e.body IS NULL THEN coalesce(e.payload, jsonb 'null') END
               AS payload,
           decode(e.body, 'base64') AS body, e.content_type, e.key, e.tenant, e.once,
           e.headers, make_interval(secs => e.once_for_s) AS once_for, e.deliver_at,
           greatest(clock_timestamp(), e.deliver_at)
               + make_interval(secs => e.expires_in_s) AS expires_at
      FROM ROWS FROM (
           jsonb_to_recordset(
               CAST(convert_from(CAST(:events AS bytea), 'UTF8') AS jsonb)) AS (
               type text, payload jsonb, key text, tenant text, once text, headers jsonb,
               once_for_s float8, deliver_at timestamptz, expires_in_s float8, body text,
               content_type text)
           ) WITH ORDINALITY AS e(type, payload, key, tenant, once, headers, once_for_s,
                                  deliver_at, expires_in_s, body, content_type, n))
SELECT p.size, p.n, p.is_json, {schema}.payload_bytes_max() AS size_max,
       CASE WHEN p.size <= {schema}.payload_bytes_max() THEN (
           SELECT {publish} FROM event) END
       AS published
  FROM (SELECT coalesce(octet_length(body), octet_length(CAST(payload AS text))) AS size, n,
               body IS NULL AS is_json
          FROM event ORDER BY 1 DESC LIMIT 1) p
"""
_ARRAYS = """
                      types => array_agg(type ORDER BY n),
                      payloads => array_agg(payload ORDER BY n),
                      keys => array_agg(key ORDER BY n),
                      onces => array_agg(once ORDER BY n),
                      headers => array_agg(headers ORDER BY n),
                      once_for => array_agg(once_for ORDER BY n),
                      deliver_at => array_agg(deliver_at ORDER BY n),
                      expires_at => array_agg(expires_at ORDER BY n),
                      bodies => array_agg(body ORDER BY n),
                      content_types => array_agg(content_type ORDER BY n),
                      digests => CAST(:digests AS bytea[])"""

PUBLISH_MANY = _SEVERAL.replace(
    "{publish}",
    f"""CAST({{schema}}.publish_events(
                      tenants => array_agg(tenant ORDER BY n),{_ARRAYS}) AS text[])""",
)

# The same for a token of a tenant: held if its share does not cover them; see
# schema/0022_shares.sql.
PUBLISH_SHARED = _SEVERAL.replace(
    "{publish}",
    f"""to_jsonb({{schema}}.publish_shared(
                      tenant => CAST(:tenant AS text), passes => CAST(:passes AS boolean),
                      costs => CAST(:costs AS integer[]),
                      costs_version => CAST(:costs_version AS bigint),
                      held_max => CAST(:held_max AS bigint),
                      {_ARRAYS.lstrip()}))""",
)

# Claims an idempotency key; true if this transaction may publish for it.
CLAIM_ONCE = """
SELECT {schema}.claim_once(
           CAST(:once AS text), keep => make_interval(secs => CAST(:once_for_s AS float8)))
"""

# Releases an idempotency key; true if it was taken.
RESET_ONCE = "SELECT {schema}.reset_once(CAST(:once AS text))"

# The position of the transaction's snapshot; see schema/0027_positions.sql.
SNAPSHOT_POSITION = "SELECT {schema}.snapshot_position()"

# Begin, commit and roll back: a savepoint inside the caller's transaction, or a transaction.
NESTED = (
    "SAVEPOINT outbox",
    "RELEASE SAVEPOINT outbox",
    ("ROLLBACK TO SAVEPOINT outbox", "RELEASE SAVEPOINT outbox"),
)
ALONE = ("BEGIN", "COMMIT", ("ROLLBACK",))

_PLAIN_NAME = re.compile(r"\w+", re.ASCII)


@lru_cache(maxsize=256)
def publish_in(schema: str, names: tuple[str, ...]) -> str:
    """The statement that publishes one event with these arguments.

    Without those that are not given, because each costs a driver and the server some microseconds.
    """
    arguments = ", ".join(f"{name} => CAST(:{name} AS {_PUBLISH_TYPES[name]})" for name in names)
    return in_schema(_PUBLISH.replace("{arguments}", arguments), schema)


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
