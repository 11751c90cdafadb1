"""The user that the server runs as: PostgreSQL refuses to run as root."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.errors import CannotRun

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Account:
    """The user of the server's processes."""

    uid: int
    gid: int
    name: str


def account_for(data_dir: Path | None) -> Account | None:
    """Return the account to run as; None unless this process runs as root.

    It is the owner of an existing data directory, or else `nobody`.

    Raises:
        CannotRun: there is no such user.
    """
    if os.geteuid() != 0:
        return None
    import pwd  # POSIX only

    owner_uid = data_dir.stat().st_uid if data_dir is not None and data_dir.exists() else 0
    try:
        entry = pwd.getpwuid(owner_uid) if owner_uid else pwd.getpwnam("nobody")
    except KeyError as error:
        user = f"uid {owner_uid}" if owner_uid else "user nobody"
        raise CannotRun(
            f"PostgreSQL does not run as root and there is no {user} to run it as: "
            "start this as an ordinary user"
        ) from error
    return Account(entry.pw_uid, entry.pw_gid, entry.pw_name)


def change_owner(path: Path, account: Account | None) -> None:
    """Make `account` the owner of a new directory."""
    if account is not None:
        os.chown(path, account.uid, account.gid)
