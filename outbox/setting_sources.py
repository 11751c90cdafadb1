"""Sources of settings: environment variables and the settings file.

Both refuse a name that they do not know, because a misspelled setting would silently keep its
default.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox.core.model.text import truncate
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

ENV_PREFIX = "OUTBOX_"
FILE_SUFFIX = "_FILE"
CONFIG_VARIABLE = "OUTBOX_CONFIG"
CONFIG_FILE = "outbox.toml"
ROOT_UID = 0

# Variables that are read elsewhere: the settings file, tracebacks, PostgreSQL's programs, and what
# `outbox snapshot` sets for its command.
_OTHER_VARIABLES = (
    CONFIG_VARIABLE,
    "OUTBOX_DEBUG",
    "OUTBOX_PG_BIN",
    "OUTBOX_SNAPSHOT",
    "OUTBOX_POSITION",
)

# Kubernetes sets these variables in every pod of the namespace of a Service that is named
# `outbox` or `outbox-…`.
_SERVICE_VARIABLE = re.compile(
    r"""OUTBOX_ (?:[A-Z0-9_]+_)? (?:
        SERVICE_HOST=.* | SERVICE_PORT (?:_[A-Z0-9_]+)? =[0-9]+
      | PORT (?:_[0-9]+_(?:TCP|UDP|SCTP))? =(?:tcp|udp|sctp)://.*
      | PORT_[0-9]+_(?:TCP|UDP|SCTP)_(?:PROTO|PORT|ADDR) =.*
    )""",
    re.VERBOSE,
)


def read_environment(
    env: Mapping[str, str], variables: Mapping[str, str], secrets: Collection[str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Read the settings in environment variables; empty ones are not set.

    Args:
        variables: the variable of each field.
        secrets: fields that can also be read from a file, by OUTBOX_…_FILE.

    Returns:
        By field, the variable that was read, and the value.

    Raises:
        UsageError: a variable is unknown, two variables set one field, or a file is unreadable.
    """
    origins: dict[str, str] = {}
    values: dict[str, Any] = {}
    files = {name: variables[name] + FILE_SUFFIX for name in secrets}
    _refuse_unknown(env, {*variables.values(), *files.values(), *_OTHER_VARIABLES})
    for name, variable in variables.items():
        # Compose files and shells pass an unset variable as an empty one.
        if env.get(variable):
            values[name], origins[name] = env[variable], variable
    for name, variable in files.items():
        if not env.get(variable):
            continue
        if name in values:
            raise UsageError(f"{origins[name]} and {variable} are both set; keep one")
        values[name], origins[name] = read_secret(variable, env[variable]), variable
    return origins, values


def read_secret(variable: str, path: str) -> str:
    """Read the file that a variable OUTBOX_…_FILE names.

    Raises:
        UsageError: it is unreadable or empty.
    """
    try:
        value = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"{variable}: {path}: {_unreadable_reason(error)}") from None
    if not value:
        raise UsageError(f"{variable}: the file {path} is empty")
    return value


def read_file(
    named: str | os.PathLike[str] | None, keys: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Read the settings file.

    Args:
        named: the file's path; None: `outbox.toml` in the working directory, if it exists.  A file
            that was not named must not be under another user's control.
        keys: the field of each key of the file.

    Returns:
        By field, the place of the setting, and the value.

    Raises:
        UsageError: the file is absent, unreadable, invalid or not trustworthy.
    """
    path = Path(named or CONFIG_FILE)
    try:
        with open(path, encoding="utf-8", opener=None if named else _open_at_once) as file:
            if not named:
                _require_own(path, file.fileno())
            text = file.read()
    except FileNotFoundError:
        if named:
            raise UsageError(f"{path}: the settings file does not exist") from None
        return {}, {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {_unreadable_reason(error)}") from None
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from None
    values = {}
    for key, value in found.items():
        if key not in keys:
            hint = nearest(key, keys)
            raise UsageError(f'{path}: there is no setting "{truncate(key)}"{hint}')
        values[keys[key]] = value
    return {name: f"{path}, {key}" for key, name in keys.items()}, values


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the writer of a FIFO, which another user may have made."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _require_own(path: Path, fd: int) -> None:
    """Check that only this user and root control a settings file that was found.

    Commands run in directories of other users as well, such as /tmp.  A file there could
    redirect deliveries and allow private networks.

    Raises:
        UsageError: the file, or the link to it, is another user's, others may write to it, or it
            is not a regular file.
    """
    if not hasattr(os, "geteuid"):
        return  # Windows has access control lists instead.
    opened = os.fstat(fd)
    # A link in a directory of another user could select any file of this user.
    owners = {opened.st_uid, path.lstat().st_uid} - {os.geteuid(), ROOT_UID}
    if owners:
        reason = f"it belongs to another user (uid {min(owners)})"
    elif opened.st_mode & stat.S_IWOTH:
        reason = "every user may write to it"
    elif not stat.S_ISREG(opened.st_mode):
        reason = "it is not a regular file"
    else:
        return
    raise UsageError(
        f"{path.absolute()} is refused, because {reason}; remove it, run in another directory, or "
        f"name the file that you trust with --config or {CONFIG_VARIABLE}"
    )


def _refuse_unknown(env: Mapping[str, str], known: Collection[str]) -> None:
    for name in sorted(env):
        unknown = name.startswith(ENV_PREFIX) and name not in known and env[name]
        if unknown and not _SERVICE_VARIABLE.fullmatch(f"{name}={env[name]}"):
            raise UsageError(f"{truncate(name)}: there is no such setting{nearest(name, known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a message: the known name that is the most similar one, or nothing."""
    near = difflib.get_close_matches(name, known, 1)
    return f'; did you mean "{near[0]}"?' if near else ""


def _unreadable_reason(error: Exception) -> str:
    return str(error.strerror) if isinstance(error, OSError) else "not UTF-8 text"
