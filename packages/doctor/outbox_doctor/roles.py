"""Check of roles: relays and the current role have the privileges they need, and not more."""

from __future__ import annotations

from typing import Any

from outbox.core.model.sql_names import quote_ident
from outbox.store.privileges import PURPOSES, missing_privileges
from outbox.store.sql.expressions import lease_runs
from outbox_doctor.check import (
    CheckResult,
    DoctorContext,
    Results,
    check,
    join_names,
    ok,
    problem,
    warning,
)

# Superusers and members of the owner among the roles of running relays; without a relay, the
# current role if it is a superuser.  All roles may read the role of a session.
PRIVILEGED_RELAYS = f"""
WITH seen AS (
    SELECT DISTINCT r.rolname, r.rolsuper, pg_has_role(r.oid, c.relowner, 'USAGE') AS owns
      FROM replica p
      JOIN pg_stat_activity a ON a.application_name = p.label
      JOIN pg_roles r ON r.oid = a.usesysid
      JOIN pg_class c ON c.oid = 'outbox'::regclass
     WHERE {lease_runs("p")})
SELECT rolname AS role, 'a relay connects' AS who, rolsuper FROM seen WHERE rolsuper OR owns
UNION ALL
SELECT rolname, 'a relay would connect', rolsuper FROM pg_roles
 WHERE rolname = current_user AND rolsuper AND NOT EXISTS (SELECT FROM seen)
 ORDER BY role
"""  # noqa: S608 (constants only)

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

# The purposes of roles: who may call the function that lists the privileges of each.
GRANTED_PURPOSES = f"""
    SELECT w.purpose, acl.grantee
      FROM unnest('{{{",".join(PURPOSES)}}}'::text[]) AS w(purpose)
      JOIN pg_proc p ON p.pronamespace = quote_ident(current_schema())::regnamespace
       AND p.proname = w.purpose || '_privileges'
     CROSS JOIN LATERAL aclexplode(p.proacl) AS acl
     WHERE acl.grantee <> 0
"""  # noqa: S608 (constants only)

# Roles that can read secrets, although their purposes do not read them.  NULL: PUBLIC.  Server-wide
# grants such as pg_read_all_data are not considered.
ROLES_WITH_SECRETS = f"""
WITH purposes AS ({GRANTED_PURPOSES}),
given AS (
    SELECT c.relname, c.relowner, acl.grantee
      FROM unnest('{{endpoint,endpoint,endpoint_secret,token,fetch_token}}'::text[],
                  '{{headers,identity,secret,hash,hash}}'::text[]) AS s(name, secret)
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
       AND NOT EXISTS (SELECT FROM purposes p WHERE p.purpose IN ('relay', 'operator', 'api')
                          AND pg_has_role(r.oid, p.grantee, 'USAGE'))
 GROUP BY g.grantee, r.rolname ORDER BY r.rolname NULLS FIRST
"""  # noqa: S608 (a constant only)

# Purposes of the current role, including inherited ones.  The query needs no rights in the
# schema.
READ_PURPOSES = f"""
SELECT current_user AS role,
       ARRAY(SELECT DISTINCT purpose FROM ({GRANTED_PURPOSES}) AS granted
              WHERE pg_has_role(grantee, 'USAGE') ORDER BY 1) AS purposes
"""  # noqa: S608 (a constant only)

OWNER = "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = 'outbox'::regclass"


@check("roles")
async def privileges(context: DoctorContext) -> Results:
    """Relays and the current role have the privileges they need, and not more."""
    wrong = False
    for query, describe in (
        (PRIVILEGED_RELAYS, _privileged_relay),
        (CREATORS, _creator),
        (ROLES_WITH_SECRETS, _secret_reader),
    ):
        for row in await context.db.fetch(query):
            wrong = True
            yield describe(context, row)
    about = await context.db.fetchrow(READ_PURPOSES)
    if not await context.db.fetchval(OWNER):
        async for result in _check_purposes(context, about["role"], about["purposes"]):
            yield result
    elif not wrong:
        yield ok(f'"{about["role"]}" owns the tables')


def _privileged_relay(context: DoctorContext, row: Any) -> CheckResult:
    what, reach = "a superuser", "the whole server"
    if not row["rolsuper"]:
        what, reach = "which owns the schema", "all of the schema"
    return warning(
        f'{row["who"]} as "{row["role"]}", {what}: a compromised relay would control {reach}',
        f"create a role for relays, and run: {context.grant_command('relay', 'ROLE')}",
    )


def _creator(context: DoctorContext, row: Any) -> CheckResult:
    role = row["role"] if row["role"] == "PUBLIC" else quote_ident(row["role"])
    return problem(
        f"{role} may create objects in the schema, which the schema's functions could run with "
        "the owner's rights",
        f"REVOKE CREATE ON SCHEMA {quote_ident(context.schema)} FROM {role}",
    )


def _secret_reader(context: DoctorContext, row: Any) -> CheckResult:
    names = ", ".join(map(context.qualify, row["tables"]))
    if row["role"] is None:
        return warning(
            f"PUBLIC has SELECT on {names}, including secrets",
            f"REVOKE SELECT ON {names} FROM PUBLIC",  # noqa: S608 (for an operator to read)
        )
    purposes = row["purposes"]
    what = f"a {' and a '.join(purposes)}" if purposes else "which has no purpose here"
    return warning(
        f'"{row["role"]}", {what}, can read the secrets in {names}',
        "as their owner (this revokes its other privileges in the schema): "
        + context.grant_command(purposes[0] if purposes else "reader", row["role"]),
    )


async def _check_purposes(context: DoctorContext, role: str, purposes: list[str]) -> Results:
    if not purposes:
        yield warning(
            f'"{role}" has no purpose ({", ".join(PURPOSES)}): its privileges were granted by hand',
            f"as their owner: {context.grant_command('reader', role)} (or another purpose)",
        )
    for purpose in purposes:
        # A producer may not read the required privileges.
        missing = [] if purpose == "producer" else await missing_privileges(context.db, purpose)
        if missing:
            yield problem(
                f'"{role}", whose purpose is {purpose}, lacks {join_names(missing)}',
                f"as their owner: {context.grant_command(purpose, role)}",
            )
        else:
            yield ok(
                f'"{role}" has the privileges of the purpose {purpose}, and does not own the tables'
            )
