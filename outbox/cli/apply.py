"""`outbox apply`: apply endpoints from a declaration file."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from outbox.cli.common import (
    actor,
    print_result,
    run_operation,
    warn_about_networks,
)
from outbox.cli.output import print_changed, style
from outbox.core.model import endpoint_config
from outbox.core.model.text import count, safe
from outbox.destinations.http.endpoint_validation import check_declared, policy_of
from outbox.errors import UsageError
from outbox.operations.apply import apply_file
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.apply import ApplyReport

_SIGNS = {"add": "+", "change": "~", "remove": "-", "keep": "="}
_COLOURS = {"add": "green", "change": "yellow", "remove": "red", "keep": None}
FILE_BYTES_MAX = 4 * 1024 * 1024
VALUES_MAX = 1_000_000
"""Limit after alias expansion; no file of `FILE_BYTES_MAX` without aliases has that many values."""


def _show(report: ApplyReport) -> None:
    for step in report.endpoints:
        line = f"{_SIGNS[step.action]} {step.name}"
        if step.pending:
            line += f" (dead-letters {count(step.pending, 'delivery')})"
        click.echo(style(safe(line), fg=_COLOURS[step.action]))
        print_changed(step.changed, indent=4)
        if step.secret is not None:
            click.echo(f"    secret: {step.secret}")
    if report.not_in_the_file:
        names = " ".join(report.not_in_the_file)
        click.echo(safe(f"not in the file, unchanged (--prune removes them): {names}"))
    changes = count(report.changes, "endpoint")
    if not report.changes:
        click.echo("nothing to change")
    elif report.dry_run:
        click.echo(f"{changes} would change; nothing was changed")
    else:
        click.echo(f"{changes} changed")
    if any(step.secret for step in report.endpoints):
        click.echo("Save the secrets now; they are not shown again.", err=True)


@click.command(
    epilog="""\b
A file:
  defaults:
    retry: patient
  endpoints:
    - name: billing
      url: https://example.com/hooks
      types: [order.*, refund.done]
      lanes: 4
    - name: audit
      url: https://audit.example.com/
      all_tenants: true
      retry: {preset: stepped, attempts: 8}

\b
Examples:
  outbox endpoint export > endpoints.yaml
  outbox apply -f endpoints.yaml --dry-run
  outbox apply -f endpoints.yaml --prune
"""
)
@click.option(
    "-f", "--file", "path", required=True, metavar="FILE",
    help="YAML file, or JSON or TOML by its extension; - reads YAML from stdin.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print what would change; change nothing.")
@click.option("--prune", is_flag=True, help="Remove endpoints that are not in the file.")
@click.option(
    "--dead-letter",
    is_flag=True,
    help="With --prune: dead-letter the pending deliveries of removed endpoints.",
)
@print_result(_show)
def command(
    settings: Settings, path: str, dry_run: bool, prune: bool, dead_letter: bool
) -> ApplyReport:
    """Apply endpoints from a file, all of them or none.

    Omitted settings have their defaults, so applying a file twice changes nothing.
    An endpoint is identified by its id, if the file has one, or else by its name; with
    an id, a different name renames it. Signing secrets of new endpoints are shown
    once. The state (paused, disabled) is not part of the file, and stays.
    """
    if dead_letter and not prune:
        raise UsageError("--dead-letter requires --prune")
    policy, vault = policy_of(settings), Vault.from_settings(settings)
    try:
        declared = endpoint_config.parse_file(_document(path))
        check_declared(declared, policy)
        report = run_operation(
            settings,
            apply_file,
            declared,
            actor=actor(),
            prune=prune,
            dead_letter=dead_letter,
            dry_run=dry_run,
            vault=vault,
        )
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    opened = {
        step.name
        for step in report.endpoints
        if step.action == "add" or "allow_networks" in step.changed
    }
    for each in declared:
        if each.settings.name in opened:
            warn_about_networks(f"{each.place}.allow_networks", each.settings.allow_networks)
    return report


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


def _document(path: str) -> Any:
    """Parse a declaration file in YAML, JSON or TOML.

    Raises:
        UsageError: the file cannot be read or parsed.
    """
    raw = _bytes(path)
    if len(raw) > FILE_BYTES_MAX:
        raise UsageError(f"is longer than {FILE_BYTES_MAX} bytes")
    try:
        text = raw.decode()
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
