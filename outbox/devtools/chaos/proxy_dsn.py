"""The same database by another way: through a port of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.store.connection.dsn import Dsn

_FIELD = re.compile(r"((?:\\.|[^:\\])*)(?::|$)")


def require_detour(dsn: Dsn) -> None:
    """Refuse a database that can only be reached by its own name.

    Raises:
        CannotRun: its certificate has to carry that, and a detour has another one.
    """
    if dsn.sslmode == "verify-full" or dsn.tls.get("sslrootcert") == "system":
        raise CannotRun(
            "with sslmode=verify-full the relays cannot be led through a proxy of this machine, "
            "whose name the certificate does not carry: use sslmode=verify-ca for this"
        )


def through(dsn: Dsn, host: str, port: int, *, env: Mapping[str, str] | None = None) -> str:
    """The DSN's only address replaced by this one, as key=value text."""
    (true_address,) = dsn.addresses
    parameters: dict[str, str | None] = {
        "host": host,
        "port": str(port),
        "dbname": dsn.database,
        "user": dsn.user,
        "password": dsn.password or _stored_password(dsn, true_address, env or os.environ),
        # A Unix socket is never encrypted, whatever is asked for.
        "sslmode": "disable" if true_address[0].startswith("/") else dsn.sslmode,
        "connect_timeout": str(max(int(dsn.connect_timeout_s), 1)),
        "statement_cache_size": None if dsn.statement_cache else "0",
        "options": dsn.server_settings.get("options"),
        **dsn.tls,
        **dsn.extra,
    }
    return " ".join(f"{name}={_quoted(value)}" for name, value in parameters.items() if value)


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _stored_password(dsn: Dsn, address: tuple[str, int], env: Mapping[str, str]) -> str | None:
    """The password for the true address, from where the way there would look for it.

    libpq's PGPASSWORD is in the DSN already.  Grammar of the file: PostgreSQL
    documentation, 34.16 The Password File.
    """
    path = Path(dsn.passfile or env.get("PGPASSFILE") or Path.home() / ".pgpass")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    host = "localhost" if address[0].startswith("/") else address[0]
    wanted = (host, str(address[1]), dsn.database, dsn.user)
    for line in lines:
        if line.startswith("#"):
            continue
        fields = [re.sub(r"\\(.)", r"\1", field) for field in _FIELD.findall(line)]
        if len(fields) >= 5 and all(f in ("*", w) for f, w in zip(fields[:4], wanted, strict=True)):
            return fields[4]
    return None
