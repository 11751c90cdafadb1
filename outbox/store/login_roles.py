"""The database roles of other processes: `outbox migrate --create-role`.

An address has the name and the password of a role.  The server gets the verifier of the password,
never the password, which its log could show.  Verifier: RFC 5803; PostgreSQL documentation,
CREATE ROLE.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from base64 import b64encode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.model.sql_names import quote_ident, quote_literal
from outbox.drivers.errors import server_error
from outbox.errors import CannotRun, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection

SALT_BYTES = 16
ITERATIONS = 4096  # As PostgreSQL's scram_iterations.
TRIES_MAX = 3
"""Tries of a message while other sessions change the same roles."""

# What speaks against giving some roles a password; a role that does not exist has no row.
READ_ROLES = """
SELECT rolname AS name, rolsuper AS is_superuser, rolname = current_user AS is_own
  FROM pg_roles WHERE rolname = ANY ($1::text[])
"""

# Another session may create the role at the same time.
WRITE_ROLE = """BEGIN
    CREATE ROLE {role} LOGIN PASSWORD {password};
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    ALTER ROLE {role} LOGIN PASSWORD {password};
END"""
CREATE_ROLE = """BEGIN
    CREATE ROLE {role} LOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END"""


@dataclass(frozen=True, slots=True)
class LoginRole:
    """The role of a process, as the address that it connects with names it."""

    purpose: str
    """One of `privileges.PURPOSES`."""
    name: str
    password: str | None = field(repr=False)
    """The password; None if the server identifies the role in another way, as by a certificate."""
    source: str
    """Where the address is from, for messages."""


async def read_new_roles(connection: Connection[Any], roles: Sequence[LoginRole]) -> set[str]:
    """The names of the roles that do not exist yet, after a check of all.

    Raises:
        UsageError: a superuser, the current role, a password that is not ASCII, or two passwords of
            one role.
    """
    names = [role.name for role in roles]
    found = {row["name"]: row for row in await connection.fetch(READ_ROLES, names)}
    passwords: dict[str, str | None] = {}
    for role in roles:
        if (row := found.get(role.name)) is not None and (row["is_own"] or row["is_superuser"]):
            which = "runs this command" if row["is_own"] else "is a superuser"
            raise UsageError(
                f'{role.source}: the role "{role.name}" {which}; a process needs a role of its own'
            )
        if role.password is not None and not _is_plain(role.password):
            raise UsageError(
                f"{role.source}: the password has characters other than printable ASCII ones, "
                "which servers normalize; choose another one"
            )
        if passwords.setdefault(role.name, role.password) != role.password:
            raise UsageError(
                f'{role.source}: the role "{role.name}" has another password in another address'
            )
    return set(passwords) - set(found)


async def write_login_roles(connection: Connection[Any], roles: Sequence[LoginRole]) -> None:
    """Create roles that log in, or give those that exist their passwords: all or none.

    Raises:
        CannotRun: the current role may not create a role, or set its password.
        asyncpg.PostgresError: any other error of the server.
    """
    blocks = {role.name: f"DO {quote_literal(_block(role))}" for role in roles}
    if not blocks:
        return
    for further in reversed(range(TRIES_MAX)):
        try:
            await connection.execute("; ".join(blocks.values()))
            return
        except asyncpg.InsufficientPrivilegeError as error:
            named = ", ".join(f'"{name}"' for name in blocks)
            raise CannotRun(
                f"no role of {named} was created or given its password: "
                f"{server_error(error).message}; run as a role with CREATEROLE that created those "
                f"that exist, or create them and use --{roles[0].purpose} instead of --create-role "
                "(Helm: migration.createRoles: false)"
            ) from error
        except asyncpg.InternalServerError:
            # "tuple concurrently updated": another migration has given a role its password.
            if not further:
                raise


def _block(role: LoginRole) -> str:
    if role.password is None:
        return CREATE_ROLE.format(role=quote_ident(role.name))
    verifier = scram_verifier(role.password, os.urandom(SALT_BYTES))
    return WRITE_ROLE.format(role=quote_ident(role.name), password=quote_literal(verifier))


def scram_verifier(password: str, salt: bytes) -> str:
    """What a server stores for a password of printable ASCII characters (RFC 5803).

    Args:
        salt: random bytes.
    """
    salted = hashlib.pbkdf2_hmac("sha256", password.encode("ascii"), salt, ITERATIONS)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    encoded = [b64encode(each).decode("ascii") for each in (salt, stored, server)]
    return "SCRAM-SHA-256${}:{}${}:{}".format(ITERATIONS, *encoded)


def _is_plain(password: str) -> bool:
    """Whether SASLprep (RFC 4013) changes nothing in a password."""
    return password.isascii() and password.isprintable()
