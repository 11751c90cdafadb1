"""The product that a server is: PostgreSQL, or a database that only speaks its protocol.

Which ids were rolled back is concluded from the transaction ids, the locks and the sequences of one
PostgreSQL server.  A distributed or columnar database has others, or none.  Several report a
version of PostgreSQL that this program accepts, so the number alone does not refuse them.
PostgreSQL with extensions, and distributions of it (Amazon RDS and Aurora, EDB, Neon, Percona,
Supabase, TimescaleDB), are PostgreSQL.
"""

from __future__ import annotations

import re

READ_VERSION = "SELECT version()"
FOREIGN_PARAMETERS = ("crdb_version", "padb_revision", "crate_version")
"""What CockroachDB, Redshift and CrateDB report at the login: their catalogs may fail a client that
expects PostgreSQL's."""

# What `version()` of each contains.  Sources: the products' documentation and source code, and for
# YugabyteDB https://docs.yugabyte.com/latest/api/ysql/.
_PRODUCTS = {
    "CockroachDB": "CockroachDB",
    "-YB-": "YugabyteDB",
    "Redshift": "Amazon Redshift",
    "Greenplum Database": "Greenplum",
    "Cloudberry": "Apache Cloudberry",
    "Materialize": "Materialize",
    "RisingWave": "RisingWave",
    "CedarDB": "CedarDB",
    "CrateDB": "CrateDB",
    "QuestDB": "QuestDB",
    "openGauss": "openGauss",
}
# PostgreSQL names its compiler; Spanner's adapter reports a number alone.
_NUMBER_ALONE = re.compile(r"PostgreSQL [0-9.]+")


def explain_foreign_product(version: str) -> str | None:
    """Why a server cannot be used, given the text of its `version()`; None: it is PostgreSQL."""
    product = next((name for text, name in _PRODUCTS.items() if text in version), None)
    if product is None:
        if _NUMBER_ALONE.fullmatch(version.strip()) is None:
            return None
        product = "a database that only speaks PostgreSQL's protocol"
    return (
        f"the server is {product}, which is not supported: that no event is lost or reordered "
        "rests on PostgreSQL's own transaction ids, locks and sequences; use a PostgreSQL server"
    )
