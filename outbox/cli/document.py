"""Files that a command reads: YAML, or JSON or TOML by the extension."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

from outbox.errors import UsageError

FILE_BYTES_MAX = 4 * 1024 * 1024
VALUES_MAX = 1_000_000
"""Limit after alias expansion; no file of `FILE_BYTES_MAX` without aliases has that many values."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A YAML loader that rejects duplicate keys and alias bombs.

    PyYAML silently keeps the last of several duplicate keys, and nested aliases can
    expand a file of a few lines beyond the memory ("billion laughs").
    """

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _check_size(node, {})
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is a list or a mapping", key.start_mark
                )
            name = str(key.value)
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f'duplicate key "{name}"', key.start_mark
                )
            seen.add(name)
        return dict(super().construct_mapping(node, deep=deep))


def _check_size(node: Any, sizes: dict[int, int]) -> int:
    """Count the values of a node after alias expansion.

    Raises:
        UsageError: there are more than `VALUES_MAX`.
        RecursionError: an alias refers to a node that contains it.
    """
    if (known := sizes.get(id(node))) is not None:
        return known
    parts: list[Any] = []
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif isinstance(node, yaml.MappingNode):
        parts = [each for pair in node.value for each in pair]
    size = sizes[id(node)] = 1 + sum(_check_size(each, sizes) for each in parts)
    if size > VALUES_MAX:
        line = node.start_mark.line + 1
        raise UsageError(f"line {line}: expands to more than {VALUES_MAX} values by its aliases")
    return size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate keys in JSON objects."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f'duplicate key "{key}"')
        result[key] = value
    return result


def read_text(path: str, bytes_max: int = FILE_BYTES_MAX) -> str:
    """The text of a file; - is stdin.

    Raises:
        UsageError: the file cannot be read, is longer, or is not UTF-8.
    """
    raw = _bytes(path)
    if len(raw) > bytes_max:
        raise UsageError(f"is longer than {bytes_max} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot be read: {error}") from None


def read_document(path: str, bytes_max: int = FILE_BYTES_MAX) -> Any:
    """Parse a declaration file in YAML, JSON or TOML.

    Raises:
        UsageError: the file cannot be read or parsed.
    """
    text = read_text(path, bytes_max)
    try:
        match Path(path).suffix.lower():
            case ".json":
                return json.loads(text, object_pairs_hook=_unique)
            case ".toml":
                return tomllib.loads(text)
            case _:
                return yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = (
            "the indentation does not match that of the lines above"
            if (error.problem or "").startswith("expected <block end>")
            else error.problem
        )
        raise UsageError(f"{line}{problem}") from None
    except (AttributeError, LookupError, TypeError) as error:
        # PyYAML's errors for values such as "!!bool maybe" and "!!timestamp soon".
        raise UsageError(f"cannot be read: a value does not match its tag: {error}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"cannot be read: {error}") from None


def _bytes(path: str) -> bytes:
    if path == "-":
        if sys.stdin is None:
            raise UsageError("stdin is closed")
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}") from None
