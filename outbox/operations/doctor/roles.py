"""Doctor checks of roles: excess rights, missing rights, and leftovers of dropped periods."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from outbox.core.model.schema_name import migrate_command
from outbox.core.model.sql_names import quote_ident
from outbox.operations.doctor.finding import format_count, join_names, ok, problem, warning
from outbox.store.privileges import missing_privileges

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import CheckResult, DoctorContext

# Roles of running relays; without one, the current role.  All roles may read the role of a
# session.
RELAYS = """
WITH seen AS (
    SELECT DISTINCT r.rolname, r.rolsuper
      FROM replica p
      JOIN pg_stat_activity a ON a.application_name = p.label
      JOIN pg_roles r ON r.oid = a.usesysid
     WHERE p.expires_at > clock_timestamp())
SELECT rolname AS role, rolsuper AS superuser, true AS runs FROM seen
UNION ALL
SELECT rolname, rolsuper, false FROM pg_roles
 WHERE rolname = current_user AND NOT EXISTS (SELECT FROM seen)
 ORDER BY role
"""

# Purposes of the current role, including inherited ones.  The query needs no rights in the
# schema.
PURPOSES = """
SELECT current_user AS role,
       ARRAY(SELECT DISTINCT w.purpose
               FROM unnest('{producer,relay,operator,reader}'::text[]) AS w(purpose)
               JOIN pg_proc p ON p.proname = w.purpose || '_privileges'
               JOIN pg_namespace n ON n.oid = p.pronamespace AND n.nspname = current_schema()
              CROSS JOIN LATERAL aclexplode(p.proacl) AS acl
              WHERE acl.grantee <> 0 AND pg_has_role(acl.grantee, 'USAGE')
              ORDER BY 1) AS purposes
"""

OWNER = "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = 'outbox'::regclass"

# A role with CREATE could define objects that the schema's functions run with the owner's
# rights.
CREATORS = """
SELECT coalesce(r.rolname, 'PUBLIC') AS role
  FROM pg_namespace n
 CROSS JOIN LATERAL aclexplode(n.nspacl) AS acl
  LEFT JOIN pg_roles r ON r.oid = acl.grantee
 WHERE n.nspname = current_schema() AND acl.privilege_type = 'CREATE'
   AND acl.grantee <> n.nspowner
 ORDER BY 1
"""

# Roles that can read secrets, but are neither relay nor operator.  NULL: PUBLIC.  Server-wide
# grants such as pg_read_all_data are not considered.
ROLES_WITH_SECRETS = """
WITH purposes AS (
    SELECT w.purpose, acl.grantee
      FROM unnest('{producer,relay,operator,reader}'::text[]) AS w(purpose)
      JOIN pg_proc p ON p.pronamespace = quote_ident(current_schema())::regnamespace
       AND p.proname = w.purpose || '_privileges'
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

# Partitions still attached a day after their period was dropped.
EMPTY_PARTITIONS = """
SELECT count(*)
  FROM period p
  JOIN pg_class c ON c.relnamespace = quote_ident(current_schema())::regnamespace
   AND c.relname = ANY (CASE p.kind WHEN 'events' THEN ARRAY['outbox_' || p.number]
                        ELSE ARRAY['attempt_' || p.number, 'batch_' || p.number,
                                   'delivery_' || p.number] END)
 WHERE p.dropped_at < clock_timestamp() - interval '1 day'
"""


async def check_roles(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Relays and the current role have the privileges they need, and not more."""
    wrong = False
    for row in await context.db.fetch(RELAYS):
        if row["superuser"]:
            wrong = True
            yield _superuser_result(context, row["role"], runs=row["runs"])
    for row in await context.db.fetch(CREATORS):
        wrong = True
        role = row["role"] if row["role"] == "PUBLIC" else quote_ident(row["role"])
        yield problem(
            f"{role} may create objects in the schema, which the schema's functions could run with "
            "the owner's rights",
            f"REVOKE CREATE ON SCHEMA {quote_ident(context.schema)} FROM {role}",
        )
    for row in await context.db.fetch(ROLES_WITH_SECRETS):
        wrong = True
        yield _secret_reader_result(context, row["role"], row["purposes"], row["tables"])
    about = await context.db.fetchrow(PURPOSES)
    if await context.db.fetchval(OWNER):
        if not wrong:
            yield ok(f'"{about["role"]}" owns the tables')
        return
    async for result in _check_purposes(context, about["role"], about["purposes"]):
        yield result


async def _check_purposes(
    context: DoctorContext, role: str, purposes: list[str]
) -> AsyncIterator[CheckResult]:
    if not purposes:
        yield warning(
            f'"{role}" has no purpose (reader, operator, relay, producer): its privileges were '
            "granted by hand",
            f"as their owner: {grant_command(context, 'reader', role)} (or operator, relay, "
            "producer)",
        )
    for purpose in purposes:
        meant = f"an {purpose}" if purpose == "operator" else f"a {purpose}"
        # A producer may not read the required privileges.
        missing = []
        if purpose != "producer":
            missing = await missing_privileges(context.db, purpose)
        if missing:
            yield problem(
                f'"{role}", {meant}, lacks {join_names(missing)}',
                f"as their owner: {grant_command(context, purpose, role)}",
            )
        else:
            yield ok(f'"{role}" has the privileges of {meant}, and does not own the tables')


def _secret_reader_result(
    context: DoctorContext, role: str | None, purposes: list[str], tables: list[str]
) -> CheckResult:
    """The result for a role that can read secrets without being a relay or operator."""
    names = ", ".join(context.qualify(table) for table in tables)
    if role is None:
        return warning(
            f"PUBLIC has SELECT on {names}, including secrets",
            f"REVOKE SELECT ON {names} FROM PUBLIC",  # noqa: S608 (for an operator to read)
        )
    what = f"a {' and a '.join(purposes)}" if purposes else "which has no purpose here"
    return warning(
        f'"{role}", {what}, can read the secrets in {names}',
        f"as their owner (this revokes its other privileges in the schema): "
        f"{grant_command(context, purposes[0] if purposes else 'reader', role)}",
    )


async def check_empty_partitions(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Partitions that relays emptied, but do not own, are dropped by the owner."""
    count = await context.db.fetchval(EMPTY_PARTITIONS)
    run = f"as their owner: {migrate_command(context.schema)}"
    message = (
        f"{format_count(count, 'partition')} of dropped periods {'is' if count == 1 else 'are'} "
        "empty and "
        "still attached, because the relays do not own them"
    )
    if count > context.limits.empty_partitions_max:
        yield warning(f"{message}: this slows down planning", run)
    elif count:
        yield ok(message)
    else:
        yield ok("no partition of a dropped period is left")


def _superuser_result(context: DoctorContext, role: str, *, runs: bool) -> CheckResult:
    who = f'a relay connects as "{role}"' if runs else f'a relay would connect as "{role}"'
    return warning(
        f"{who}, a superuser: a compromised relay would control the whole server",
        f"create a role for relays, and run: {grant_command(context, 'relay', 'ROLE')}",
    )


def grant_command(context: DoctorContext, purpose: str, role: str) -> str:
    """Return the command that grants a role the privileges of a purpose."""
    return f"{migrate_command(context.schema)} --{purpose} {shlex.quote(role)}"
