"""Statements that write, each sent as one message.

The extended protocol sends a statement as several messages, and a client that falls silent
between two of them leaves a backend that waits for the rest with its locks held, for which
PostgreSQL before version 17 has no time-out.  A simple query is one message: while the server has
only a part of it, it holds nothing, and once it has all of it, it needs the client no more.

A simple query has no parameters and returns only the last command tag, so values are quoted
here, and the number of rows is the result.
https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-SIMPLE-QUERY
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, TypeAlias
from uuid import UUID

from asyncpg import CharacterNotInRepertoireError, DataError, PostgresError, Range

from outbox.core.model.sql_names import quote_literal
from outbox.store.errors import ABORTED

if TYPE_CHECKING:
    from collections.abc import Sequence

_PARAMETER = re.compile(r"\$(\d+)")
_PLAIN = re.compile(r"[A-Za-z0-9_.:+-]+")


@dataclass(frozen=True, slots=True)
class WriteStatement:
    """A statement that writes and returns no columns.

    Its command tag is the result, so its last part selects or writes the rows to be counted:
    `SELECT FROM moved`.  Its arguments appear in the server's log if it fails, except those
    that are `Private`.

    Args:
        name: the name under which a relay's session prepares it.
        sql: parameters are `$1` and so on; their types are inferred, as for a bound parameter.
        repeatable: a session may execute it once more if the response was lost.
    """

    name: str
    sql: str
    repeatable: bool = False

    @property
    def prepare(self) -> str:
        """The message that prepares it."""
        return f"PREPARE {self.name} AS {self.sql}"

    def execute(self, arguments: Sequence[object]) -> str:
        """A call of the prepared statement."""
        literals = ", ".join(map(literal, arguments))
        return f"EXECUTE {self.name} ({literals})" if arguments else f"EXECUTE {self.name}"

    def inline(self, arguments: Sequence[object]) -> str:
        """The statement with its arguments in place of the parameters."""
        literals = [literal(value) for value in arguments]
        return _PARAMETER.sub(lambda match: literals[int(match[1]) - 1], self.sql)


@dataclass(frozen=True, slots=True)
class Private:
    """A text argument that must not appear in the server's log, such as credentials.

    It is sent before the message, as a bound parameter, and kept in a session setting until the
    session ends or is reset.  (A proxy that pools transactions has no session settings: there it
    is a literal like the others.)
    """

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class SettingArgument:
    """An argument that is read from a session setting."""

    name: str


WriteCall: TypeAlias = "tuple[WriteStatement, *tuple[object, ...]]"
"""A statement and its arguments."""


def is_aborted(error: PostgresError) -> bool:
    """Whether a message undid itself by `abort_unless`, because its condition did not hold."""
    return bool(error.sqlstate == ABORTED)


def literal(value: object) -> str:
    """A value as a literal without a type, which is inferred as that of a parameter is.

    Raises:
        asyncpg.DataError, asyncpg.CharacterNotInRepertoireError: it is text that PostgreSQL
            cannot store.
        TypeError: no literal is defined for such a value.
    """
    if isinstance(value, SettingArgument):
        return f"current_setting({quote_literal(value.name)})"
    if value is None:
        return "NULL"
    text = _text(value)
    # Few texts have anything to escape.
    return quote_literal(text) if "'" in text or "\\" in text else f"'{text}'"


def _text(value: object) -> str:
    match value:
        case str():
            return _checked(value)
        case Private():
            return _checked(value.text)
        case bool():
            return "true" if value else "false"
        case int() | float() | UUID():
            return str(value)
        case bytes():
            return "\\x" + value.hex()
        case datetime():
            return value.isoformat()
        case list() | tuple() | set() | frozenset():
            # Most arrays are numbers.
            write = str if set(map(type, value)) == {int} else _element
            return "{" + ",".join(map(write, value)) + "}"
    raise TypeError(f"no literal of type {type(value).__name__}")


def _element(value: object) -> str:
    """An element of an array, or a range of a multirange."""
    if value is None:
        return "NULL"
    if isinstance(value, Range):
        return f"[{int(value.lower)},{int(value.upper)})"
    text = _text(value)
    if _PLAIN.fullmatch(text) and text.upper() != "NULL":
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _checked(text: str) -> str:
    # asyncpg encodes a simple query while it sends it, and closes the connection if it cannot.
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"text that is not Unicode: {error}") from error
    if "\0" in text:
        raise CharacterNotInRepertoireError("text with the character U+0000")
    return text


def rows_of(tag: str) -> int:
    """The number of rows in a command tag, such as `INSERT 0 3`; 0 if it has none."""
    count = tag.rpartition(" ")[2]
    return int(count) if count.isdigit() else 0
