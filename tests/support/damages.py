"""Kinds of damage that hide events from a relay, or falsify what it reads."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.core.sequencing.partition_window import WIDTH
from tests.support.detaching import ATTACH, DETACH

POLICY = "CREATE POLICY half ON outbox USING (id % 2 = 0)"
UNPROTECT = """
ALTER TABLE outbox NO FORCE ROW LEVEL SECURITY, DISABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS half ON outbox
"""


FOREIGN = """
DO $$ BEGIN EXECUTE (
    SELECT format('CREATE FOREIGN TABLE outbox_0 (%s) SERVER elsewhere',
                  string_agg(format('%I %s', attname, format_type(atttypid, atttypmod)), ', '
                             ORDER BY attnum))
      FROM pg_attribute WHERE attrelid = 'kept'::regclass AND attnum > 0 AND NOT attisdropped);
END $$
"""


@dataclass(frozen=True)
class Damage:
    """How events are hidden, what lifts it, and the command that is reported.

    In the statements, {role} is the relay's role.
    """

    hide: str
    lift: str
    reports: str


DAMAGES = {
    "a foreign table": Damage(
        f"{DETACH}; ALTER TABLE outbox_0 RENAME TO kept; CREATE FOREIGN DATA WRAPPER absent;"
        f" CREATE SERVER elsewhere FOREIGN DATA WRAPPER absent; {FOREIGN}",
        f"DROP FOREIGN DATA WRAPPER absent CASCADE; ALTER TABLE kept RENAME TO outbox_0; {ATTACH}",
        "ATTACH PARTITION relay.outbox_0",
    ),
    "a policy": Damage(
        f"ALTER TABLE outbox ENABLE ROW LEVEL SECURITY; {POLICY}",
        UNPROTECT,
        "ALTER TABLE relay.outbox DISABLE ROW LEVEL SECURITY",
    ),
    "a forced policy": Damage(
        f"ALTER TABLE outbox ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY; {POLICY}",
        UNPROTECT,
        "ALTER TABLE relay.outbox DISABLE ROW LEVEL SECURITY",
    ),
    "row security without a policy": Damage(
        "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY",
        UNPROTECT,
        "ALTER TABLE relay.outbox DISABLE ROW LEVEL SECURITY",
    ),
    "a view in place": Damage(
        "ALTER TABLE outbox RENAME TO kept;"
        " CREATE VIEW outbox AS SELECT * FROM kept WHERE id % 2 = 0;"
        " GRANT ALL ON outbox TO PUBLIC",
        "DROP VIEW outbox; ALTER TABLE kept RENAME TO outbox",
        "RENAME TO outbox",
    ),
    "a detached partition": Damage(
        DETACH,
        ATTACH,
        "ATTACH PARTITION relay.outbox_0",
    ),
    "CACHE": Damage(
        "ALTER SEQUENCE outbox_id_seq CACHE 20", "ALTER SEQUENCE outbox_id_seq CACHE 1", "CACHE 1"
    ),
    "INCREMENT": Damage(
        "ALTER SEQUENCE outbox_id_seq INCREMENT 2",
        "ALTER SEQUENCE outbox_id_seq INCREMENT 1",
        "INCREMENT 1",
    ),
    "CYCLE": Damage(
        "ALTER SEQUENCE outbox_id_seq CYCLE", "ALTER SEQUENCE outbox_id_seq NO CYCLE", "NO CYCLE"
    ),
    "setval": Damage(
        "SELECT setval('outbox_id_seq', 2)",
        f"SELECT setval('outbox_id_seq', {WIDTH + 1})",
        "setval",
    ),
    "a revoked column": Damage(
        "REVOKE SELECT ON outbox FROM {role}",
        "GRANT SELECT ON outbox TO {role}",
        "outbox migrate --relay",
    ),
}
