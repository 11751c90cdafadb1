"""Rewrites a DSN so that its connections go through a proxy on this machine."""

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


def require_proxyable(dsn: Dsn) -> None:
    """Refuse sslmode=verify-full: the certificate does not name the proxy's host.

    Raises:
        CannotRun: the DSN verifies the host name of the server.
    """
    if dsn.sslmode == "verify-full" or dsn.tls.get("sslrootcert") == "system":
        raise CannotRun(
            "with sslmode=verify-full the relays cannot connect through the local proxies, "
            "whose host name is not in the certificate: use sslmode=verify-ca"
        )


def proxied_dsn(dsn: Dsn, host: str, port: int, *, env: Mapping[str, str] | None = None) -> str:
    """Return the DSN with its only address replaced, in key=value form."""
    (true_address,) = dsn.addresses
    parameters: dict[str, str | None] = {
        "host": host,
        "port": str(port),
        "dbname": dsn.database,
        "user": dsn.user,
        "password": dsn.password or _stored_password(dsn, true_address, env or os.environ),
        # Connections over a Unix socket are never encrypted.
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
    """Find the password of the original address in the password file.

    The DSN already includes PGPASSWORD.  File format: PostgreSQL documentation, 34.16 The
    Password File.
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
