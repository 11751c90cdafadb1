"""The adopted table as the catalogs describe it, and whether a mapping fits it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.sql_names import quote_ident
from outbox.core.model.text import did_you_mean, quoted
from outbox.errors import CannotRun, NotFound, UsageError

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox_adopt.mapping import SourceMapping

# session: the role that has logged in, which SET ROLE and SET SESSION AUTHORIZATION do not change.
READ_TABLE = """
SELECT c.oid, format('%I.%I', n.nspname, c.relname) AS name, c.relkind::text AS kind,
       n.nspname = current_schema() AS is_own,
       quote_ident(pg_get_userbyid(c.relowner)) AS owner,
       quote_ident(pg_get_userbyid(s.nspowner)) AS schema_owner,
       quote_ident(current_user) AS role,
       (SELECT quote_ident(usename) FROM pg_stat_activity WHERE pid = pg_backend_pid()) AS session
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_namespace s ON s.nspname = current_schema()
 WHERE c.oid = to_regclass($1)
"""

# The table, and those that inherit from it.
_WITH_TREE = """\
WITH RECURSIVE tree AS (
    SELECT $1::oid AS id
     UNION SELECT i.inhrelid FROM pg_inherits i JOIN tree ON i.inhparent = tree.id)"""

# What belongs to another role, although statements on the table may run it with the rights of this
# one: tables that inherit from it, and types, functions and operators of columns, defaults,
# constraints, triggers, policies, rules and indexes.  What belongs to a superuser does not count.
READ_FOREIGN = f"""
{_WITH_TREE},
used AS (
    SELECT part.* FROM tree CROSS JOIN LATERAL (
        SELECT 'pg_class'::regclass::oid AS class, tree.id
         UNION ALL SELECT 'pg_class'::regclass, indexrelid FROM pg_index WHERE indrelid = tree.id
         UNION ALL SELECT 'pg_attrdef'::regclass, oid FROM pg_attrdef WHERE adrelid = tree.id
         UNION ALL SELECT 'pg_constraint'::regclass, oid FROM pg_constraint WHERE conrelid = tree.id
         UNION ALL SELECT 'pg_trigger'::regclass, oid FROM pg_trigger WHERE tgrelid = tree.id
         UNION ALL SELECT 'pg_policy'::regclass, oid FROM pg_policy WHERE polrelid = tree.id
         UNION ALL SELECT 'pg_rewrite'::regclass, oid FROM pg_rewrite WHERE ev_class = tree.id
    ) part
     UNION
    SELECT needed.* FROM used CROSS JOIN LATERAL (
        SELECT refclassid, refobjid FROM pg_depend
         WHERE classid = used.class AND objid = used.id
           AND refclassid IN ('pg_type'::regclass, 'pg_proc'::regclass, 'pg_operator'::regclass)
         UNION ALL SELECT 'pg_class'::regclass, typrelid FROM pg_type
         WHERE used.class = 'pg_type'::regclass AND oid = used.id AND typrelid <> 0
         UNION ALL SELECT 'pg_constraint'::regclass, oid FROM pg_constraint
         WHERE used.class = 'pg_type'::regclass AND contypid = used.id
    ) needed)
SELECT pg_describe_object(used.class, used.id, 0) AS object,
       quote_ident(pg_get_userbyid(owned.by_role)) AS owner
  FROM used CROSS JOIN LATERAL (
       SELECT relowner FROM pg_class WHERE used.class = 'pg_class'::regclass AND oid = used.id
        UNION ALL SELECT typowner FROM pg_type
        WHERE used.class = 'pg_type'::regclass AND oid = used.id
        UNION ALL SELECT proowner FROM pg_proc
        WHERE used.class = 'pg_proc'::regclass AND oid = used.id
        UNION ALL SELECT oprowner FROM pg_operator
        WHERE used.class = 'pg_operator'::regclass AND oid = used.id) AS owned(by_role)
  JOIN pg_roles r ON r.oid = owned.by_role
 WHERE r.rolname <> current_user AND NOT r.rolsuper
 ORDER BY 1 LIMIT 1
"""

# Roles that may create triggers on the table, or on one that inherits from it.
READ_TRIGGER_GRANT = f"""
{_WITH_TREE}
SELECT format('%I.%I', n.nspname, c.relname) AS name,
       coalesce(quote_ident(r.rolname), 'PUBLIC') AS grantee
  FROM tree JOIN pg_class c ON c.oid = tree.id JOIN pg_namespace n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL aclexplode(c.relacl) a
  LEFT JOIN pg_roles r ON r.oid = a.grantee
 WHERE a.privilege_type = 'TRIGGER' AND a.grantee <> c.relowner AND r.rolsuper IS NOT TRUE
 ORDER BY 1, 2 LIMIT 1
"""

# Columns with their types; for a domain, that of its values.  is_unique: an index without a
# condition on this column alone.
READ_COLUMNS = """
SELECT a.attname AS name, format_type(t.id, NULL) AS type, a.attnotnull AS not_null,
       a.attgenerated <> '' AS generated,
       EXISTS (SELECT FROM pg_index i
                WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid
                  AND i.indpred IS NULL AND i.indnkeyatts = 1
                  AND i.indkey[0] = a.attnum) AS is_unique
  FROM pg_attribute a JOIN pg_type p ON p.oid = a.atttypid
 CROSS JOIN LATERAL (SELECT CASE p.typtype WHEN 'd' THEN p.typbasetype ELSE p.oid END) AS t(id)
 WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attnum
"""

READ_PUBLICATION = """
SELECT p.puballtables AS all_tables, pg_has_role(p.pubowner, 'USAGE') AS is_owner,
       EXISTS (SELECT FROM pg_publication_rel r
                WHERE r.prpubid = p.oid AND r.prrelid = $2) AS has_table
  FROM pg_publication p WHERE p.pubname = $1
"""

TEXT_TYPES = frozenset({"text", "character varying", "character"})
PAYLOAD_TYPES = TEXT_TYPES | {"json", "jsonb", "bytea"}
TIME_TYPES = frozenset(
    {"timestamp with time zone", "timestamp without time zone", "date", "time without time zone"}
)
ORDERED_TYPES = TIME_TYPES | {"smallint", "integer", "bigint", "numeric"}
"""Types whose highest value bounds the rows before it; that of a random UUID does not."""


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A column of the adopted table."""

    name: str
    type: str
    not_null: bool
    generated: bool
    is_unique: bool


@dataclass(frozen=True, slots=True)
class SourceTable:
    """The adopted table."""

    oid: int
    name: str
    """Schema and name, quoted for SQL."""
    columns: dict[str, SourceColumn]

    def type(self, column: str) -> str:
        """The type of a column, without its modifier."""
        return self.columns[column].type

    def own_columns(self) -> str:
        """The columns that an INSERT sets, as a list for SQL."""
        return ", ".join(quote_ident(c.name) for c in self.columns.values() if not c.generated)


async def read_source(connection: Connection[Any], name: str) -> SourceTable:
    """Read a table's columns.

    Args:
        name: the table's name with its schema, as in SQL.

    Raises:
        NotFound: there is no such table.
        UsageError: it is no table that can be adopted.
        CannotRun: the table, the schema of the outbox and the session are of different roles, or
            something of the table is of another one.
    """
    row = await connection.fetchrow(READ_TABLE, name)
    if row is None:
        raise NotFound(f"there is no table {quoted(name)}; give its schema, too: SCHEMA.TABLE")
    if row["kind"] not in ("r", "p"):
        raise UsageError(f"{row['name']} is no table; triggers need the table itself")
    if row["is_own"]:
        raise UsageError(f"{row['name']} is a table of this outbox")
    await _require_one_role(connection, row)
    found = await connection.fetch(READ_COLUMNS, row["oid"])
    columns = {each["name"]: SourceColumn(**dict(each)) for each in found}
    return SourceTable(row["oid"], row["name"], columns)


async def _require_one_role(connection: Connection[Any], row: Any) -> None:
    """Require that nothing of another role runs with the rights of this one, or of the session."""
    name, role, owner, schema_owner = row["name"], row["role"], row["owner"], row["schema_owner"]
    if owner != schema_owner:
        raise CannotRun(
            f"{name} belongs to role {owner}, and the schema of the outbox to {schema_owner}; both "
            "must be the same role, because triggers run with its rights: ALTER TABLE … OWNER TO, "
            "and grant the application what it needs"
        )
    if {role, row["session"]} != {owner}:
        used = role if role != owner else row["session"]
        raise CannotRun(
            f"{name} belongs to role {owner}, and this session is one of {used}; it must be the "
            "same role, because code of the table would run with its rights: connect as that "
            "role, without SET ROLE"
        )
    foreign = await connection.fetchrow(READ_FOREIGN, row["oid"])
    if foreign is not None:
        raise CannotRun(
            f"{foreign['object']} belongs to role {foreign['owner']}, and {name} uses it: it would "
            f"run with the rights of {role}; change its owner, or do without it"
        )
    granted = await connection.fetchrow(READ_TRIGGER_GRANT, row["oid"])
    if granted is not None:
        raise CannotRun(
            f"{granted['grantee']} may create triggers on {granted['name']}, which would run with "
            f"the rights of {role}: REVOKE TRIGGER ON {granted['name']} FROM {granted['grantee']}"
        )


async def check_mapping(
    connection: Connection[Any], source: SourceTable, mapping: SourceMapping
) -> None:
    """Check that a mapping fits the table.

    Raises:
        UsageError: it does not; the message begins with the setting.
        NotFound: there is no such publication.
        CannotRun: the role does not own it.
    """
    for column, setting in mapping.columns().items():
        if column not in source.columns:
            has = f"it has: {', '.join(source.columns)}"
            hint = did_you_mean(column, source.columns, has)
            raise UsageError(f"{setting}: {source.name} has no column {quoted(column)}; {hint}")
    identity = source.columns[mapping.id]
    if not (identity.is_unique and identity.not_null):
        raise UsageError(
            f'id: the column "{mapping.id}" needs NOT NULL and a unique index of its own'
        )
    if not source.columns[mapping.ordering].not_null:
        raise UsageError(f'order_by: the column "{mapping.ordering}" must be NOT NULL')
    _check_payload(source, mapping)
    _check_sent(source, mapping)
    if mapping.publication is not None:
        await _check_publication(connection, source, mapping.publication)


def _check_payload(source: SourceTable, mapping: SourceMapping) -> None:
    kind = source.type(mapping.payload)
    if kind not in PAYLOAD_TYPES:
        raise UsageError(
            f'payload: the column "{mapping.payload}" has the type {kind}; '
            "it must be jsonb, json, text or bytea"
        )
    if kind == "bytea" and mapping.content_type is None:
        raise UsageError("content_type: the payload of type bytea requires its media type")
    if kind != "bytea" and mapping.content_type is not None:
        raise UsageError(f"content_type: is only for a payload of type bytea, not {kind}")


def _check_sent(source: SourceTable, mapping: SourceMapping) -> None:
    if mapping.sent_column is None or mapping.pending_value is not None:
        return
    column = source.columns[mapping.sent_column]
    if column.type not in TIME_TYPES | {"boolean"}:
        raise UsageError(
            f'sent_column: the column "{column.name}" has the type {column.type}; set '
            "pending_value and sent_value, its values before and after a row is sent"
        )
    if column.type != "boolean" and column.not_null:
        raise UsageError(
            f'sent_column: the column "{column.name}" is NOT NULL; '
            "a row is pending while its time is NULL"
        )


async def _check_publication(connection: Connection[Any], source: SourceTable, name: str) -> None:
    row = await connection.fetchrow(READ_PUBLICATION, name, source.oid)
    if row is None:
        raise NotFound(f"publication: there is no publication {quoted(name)}")
    if row["all_tables"]:
        raise UsageError(
            f'publication: "{name}" is FOR ALL TABLES, so that the cut-over cannot take this '
            "table out of it; give the connector a publication of its tables "
            "(publication.autocreate.mode=filtered)"
        )
    if not row["has_table"]:
        raise UsageError(f'publication: "{name}" does not publish {source.name}')
    if not row["is_owner"]:
        raise CannotRun(f'this role does not own the publication "{name}"')
