"""Roles: relays with more rights than they need, and roles that lack one."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from outbox.core.model.schema_name import migrate_command
from outbox.core.model.sql_names import quote_ident
from outbox.operations.doctor.finding import listed, many, ok, problem, warning

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import Look, Said

# Where no relay lives, it is this role that one would connect as.  A session's role can
# be seen by everybody.
RELAYS = """
WITH seen AS (
    SELECT DISTINCT r.rolname, r.rolsuper
      FROM replica p
      JOIN pg_stat_activity a ON a.pid = ANY (p.pids)
      JOIN pg_roles r ON r.oid = a.usesysid
     WHERE p.expires_at > clock_timestamp())
SELECT rolname AS role, rolsuper AS superuser, true AS runs FROM seen
UNION ALL
SELECT rolname, rolsuper, false FROM pg_roles
 WHERE rolname = current_user AND NOT EXISTS (SELECT FROM seen)
 ORDER BY role
"""

# What this role is: it has the rights of those that it is a member of.  A role without any
# rights here can ask this, too.
PURPOSES = """
SELECT current_user AS role,
       ARRAY(SELECT DISTINCT w.purpose
               FROM unnest('{producer,relay,operator,reader}'::text[]) AS w(purpose)
               JOIN pg_proc p ON p.proname = w.purpose || '_rights'
               JOIN pg_namespace n ON n.oid = p.pronamespace AND n.nspname = current_schema()
              CROSS JOIN LATERAL aclexplode(p.proacl) AS acl
              WHERE acl.grantee <> 0 AND pg_has_role(acl.grantee, 'USAGE')
              ORDER BY 1) AS purposes
"""

OWNER = "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = 'outbox'::regclass"

# What it should have, and has not.
MISSING = """
SELECT r.privilege || ' on ' || r.name AS missing
  FROM rights($1) r
 WHERE NOT CASE r.kind
           WHEN 'sequence' THEN has_sequence_privilege(r.name, r.privilege)
           WHEN 'function' THEN (
                SELECT has_function_privilege(p.oid, r.privilege) FROM pg_proc p
                 WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
                   AND p.proname = r.name)
           ELSE CASE WHEN r.columns IS NULL THEN has_table_privilege(r.name, r.privilege)
                     ELSE (SELECT bool_and(has_column_privilege(r.name, c, r.privilege))
                             FROM unnest(r.columns) AS c) END
           END
 ORDER BY r.kind DESC, r.name
"""

# Whoever may define something here could have our functions run it, with their rights.
CREATORS = """
SELECT coalesce(r.rolname, 'PUBLIC') AS role
  FROM pg_namespace n
 CROSS JOIN LATERAL aclexplode(n.nspacl) AS acl
  LEFT JOIN pg_roles r ON r.oid = acl.grantee
 WHERE n.nspname = current_schema() AND acl.privilege_type = 'CREATE'
   AND acl.grantee <> n.nspowner
 ORDER BY 1
"""

# Who was given what only relays and operators need, and is neither.  NULL: everybody.  What
# gives all tables of a server, such as pg_read_all_data, is not granted here.
UNCALLED = """
WITH purposes AS (
    SELECT w.purpose, acl.grantee
      FROM unnest('{producer,relay,operator,reader}'::text[]) AS w(purpose)
      JOIN pg_proc p ON p.pronamespace = quote_ident(current_schema())::regnamespace
       AND p.proname = w.purpose || '_rights'
     CROSS JOIN LATERAL aclexplode(p.proacl) AS acl
     WHERE acl.grantee <> 0),
given AS (
    SELECT c.relname, c.relowner, acl.grantee
      FROM unnest('{endpoint,endpoint,endpoint_secret,token,fetch_token}'::text[],
                  '{headers,identity,secret,hash,hash}'::text[]) AS s(name, secret)
      JOIN pg_class c ON c.relnamespace = quote_ident(current_schema())::regnamespace
       AND c.relname = s.name
      JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = s.secret
     CROSS JOIN LATERAL (SELECT * FROM aclexplode(c.relacl)
                         UNION ALL SELECT * FROM aclexplode(a.attacl)) AS acl
     WHERE acl.privilege_type = 'SELECT')
SELECT r.rolname AS role, array_agg(DISTINCT g.relname::text ORDER BY g.relname::text) AS tables,
       ARRAY(SELECT p.purpose FROM purposes p WHERE p.grantee = g.grantee
              ORDER BY p.purpose) AS purposes
  FROM given g LEFT JOIN pg_roles r ON r.oid = g.grantee
 WHERE g.grantee = 0
    OR NOT r.rolsuper AND NOT pg_has_role(r.oid, g.relowner, 'USAGE')
       AND has_schema_privilege(r.oid, current_schema(), 'USAGE')
       AND NOT EXISTS (SELECT FROM purposes p WHERE p.purpose IN ('relay', 'operator')
                          AND pg_has_role(r.oid, p.grantee, 'USAGE'))
 GROUP BY g.grantee, r.rolname ORDER BY r.rolname NULLS FIRST
"""

# Partitions of dropped periods that are still attached, and have been for a day.
SHELLS = """
SELECT count(*)
  FROM period p
  JOIN pg_class c ON c.relnamespace = quote_ident(current_schema())::regnamespace
   AND c.relname = ANY (CASE p.kind WHEN 'events' THEN ARRAY['outbox_' || p.number]
                        ELSE ARRAY['attempt_' || p.number, 'batch_' || p.number,
                                   'delivery_' || p.number] END)
 WHERE p.dropped_at < clock_timestamp() - interval '1 day'
"""


async def roles(look: Look) -> AsyncIterator[Said]:
    """Relays have what they need and not much more, and so has whoever asks."""
    wrong = False
    for row in await look.db.fetch(RELAYS):
        if row["superuser"]:
            wrong = True
            yield _superuser(look, row["role"], runs=row["runs"])
    for row in await look.db.fetch(CREATORS):
        wrong = True
        role = row["role"] if row["role"] == "PUBLIC" else quote_ident(row["role"])
        yield problem(
            f"{role} may define things in the schema, which our functions could be made to "
            "run with the owner's rights",
            f"REVOKE CREATE ON SCHEMA {quote_ident(look.schema)} FROM {role}",
        )
    for row in await look.db.fetch(UNCALLED):
        wrong = True
        yield _uncalled(look, row["role"], row["purposes"], row["tables"])
    about = await look.db.fetchrow(PURPOSES)
    if await look.db.fetchval(OWNER):
        if not wrong:
            yield ok(f'"{about["role"]}" owns the tables')
        return
    async for said in _granted(look, about["role"], about["purposes"]):
        yield said


async def _granted(look: Look, role: str, purposes: list[str]) -> AsyncIterator[Said]:
    if not purposes:
        yield warning(
            f'"{role}" was granted none of our purposes: what it may do was put together by hand',
            f"as their owner: {grant(look, 'reader', role)} (or operator, relay, producer)",
        )
    for purpose in purposes:
        meant = f"an {purpose}" if purpose == "operator" else f"a {purpose}"
        # A producer may not even look at what it needs.
        missing = []
        if purpose != "producer":
            missing = [row["missing"] for row in await look.db.fetch(MISSING, purpose)]
        if missing:
            yield problem(
                f'"{role}", which is for {meant}, lacks {listed(missing)}',
                f"as their owner: {grant(look, purpose, role)}",
            )
        else:
            yield ok(f'"{role}" has what {meant} needs, and owns nothing')


def _uncalled(look: Look, role: str | None, purposes: list[str], tables: list[str]) -> Said:
    """A role that can read what only relays and operators are to."""
    names = ", ".join(look.name(table) for table in tables)
    if role is None:
        return warning(
            f"everybody was granted SELECT on {names}, with the secrets there",
            f"REVOKE SELECT ON {names} FROM PUBLIC",  # noqa: S608 (for an operator to read)
        )
    what = (
        f"is for a {' and a '.join(purposes)}" if purposes else "was granted none of our purposes"
    )
    return warning(
        f'"{role}", which {what}, can read the secrets in {names}',
        f"as their owner, which takes away what else it has here: "
        f"{grant(look, purposes[0] if purposes else 'reader', role)}",
    )


async def shells(look: Look) -> AsyncIterator[Said]:
    """What relays that own nothing have emptied is dropped by its owner now and then."""
    count = await look.db.fetchval(SHELLS)
    run = f"as their owner: {migrate_command(look.schema)}"
    says = (
        f"{many(count, 'partition')} of dropped periods {'is' if count == 1 else 'are'} empty and "
        "still attached, because the relays do not own them"
    )
    if count > look.limits.shells_max:
        yield warning(f"{says}: so many make planning slow", run)
    elif count:
        yield ok(says)
    else:
        yield ok("no partition of a dropped period is left")


def _superuser(look: Look, role: str, *, runs: bool) -> Said:
    who = f'a relay connects as "{role}"' if runs else f'a relay would connect as "{role}"'
    return warning(
        f"{who}, a superuser: whoever gets hold of the relay has the whole server",
        f"make a role for relays, and run: {grant(look, 'relay', 'ROLE')}",
    )


def grant(look: Look, purpose: str, role: str) -> str:
    """The command that gives a role what it needs for a purpose."""
    return f"{migrate_command(look.schema)} --{purpose} {shlex.quote(role)}"
