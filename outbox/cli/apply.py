"""`outbox apply`: endpoints as a file declares them."""

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
    database,
    json_option,
    run_async,
    settings_options,
    warn_of_networks,
)
from outbox.cli.output import count, emit_json, style
from outbox.core.model import endpoint_config
from outbox.core.model.text import safe
from outbox.destinations.http.endpoint_validation import check_declared, policy_of
from outbox.errors import UsageError
from outbox.operations.apply import apply
from outbox.operations.views.endpoints import applied
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.apply import Outcome

_SIGNS = {"add": "+", "change": "~", "remove": "-", "keep": "="}
_COLOURS = {"add": "green", "change": "yellow", "remove": "red", "keep": None}
FILE_BYTES_MAX = 4 * 1024 * 1024
VALUES_MAX = 1_000_000
"""More than a file of that length has, unless it says the same thing over and over."""


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
      retry: {preset: plane, attempts: 8}

\b
Examples:
  outbox endpoint export > endpoints.yaml
  outbox apply -f endpoints.yaml --dry-run
  outbox apply -f endpoints.yaml --prune
"""
)
@click.option(
    "-f", "--file", "path", required=True, metavar="FILE",
    help="YAML, or JSON or TOML by its ending; - is stdin, in YAML.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--prune", is_flag=True, help="Remove endpoints that are not in the file.")
@click.option("--give-up", is_flag=True, help="With --prune: also those that are owed deliveries.")
@json_option
@settings_options
def command(
    settings: Settings, path: str, dry_run: bool, prune: bool, give_up: bool, as_json: bool
) -> None:
    """Make the endpoints what a file declares: all of it, or nothing.

    What the file does not say is the default, so saying it again changes
    nothing.  An endpoint is known by its name, or by its id where the file has
    one: with that, another name renames it.  Signing secrets of new endpoints
    are shown this once.  Pausing and the like is not declared, and stays.
    """
    if give_up and not prune:
        raise UsageError("--give-up is about what --prune removes; say both")
    try:
        declared = endpoint_config.read(_document(path))
        policy = policy_of(settings)
        check_declared(declared, policy)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None

    vault = Vault.of(settings)

    async def go() -> Outcome:
        async with database(settings) as connection:
            return await apply(
                connection,
                settings.schema_name,
                declared,
                actor=actor(),
                prune=prune,
                give_up=give_up,
                dry_run=dry_run,
                vault=vault,
            )

    try:
        outcome = run_async(go())
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    opened = {
        step.name
        for step in outcome.steps
        if step.action == "add" or any(d.setting == "allow_networks" for d in step.differences)
    }
    for each in declared:
        if each.settings.name in opened:
            warn_of_networks(f"{each.place}.allow_networks", each.settings.allow_networks)
    if as_json:
        emit_json(applied(outcome, dry_run=dry_run))
    else:
        _show(outcome, dry_run=dry_run)


def _show(outcome: Outcome, *, dry_run: bool) -> None:
    for step in outcome.steps:
        line = f"{_SIGNS[step.action]} {step.name}"
        if step.owed:
            line += f" (gives up {count(step.owed, 'delivery')})"
        click.echo(style(safe(line), fg=_COLOURS[step.action]))
        for each in step.differences:
            click.echo(safe(f"    {each.setting}: {each.old} -> {each.new}"))
        if step.secret is not None:
            click.echo(f"    secret: {step.secret}")
    if outcome.others:
        names = " ".join(outcome.others)
        click.echo(safe(f"not in the file, and left alone (--prune removes them): {names}"))
    changes = count(outcome.changes, "endpoint")
    if not outcome.changes:
        click.echo("nothing to change")
    elif dry_run:
        click.echo(f"{changes} would change; nothing was done")
    else:
        click.echo(f"{changes} changed")
    if any(step.secret for step in outcome.steps):
        click.echo("Keep the secrets now: they are not shown again.", err=True)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML's plain values; a key that stands there twice is a mistake.

    Otherwise the last one would win without a word.  Nor may a file of a few lines become
    more than fits into the memory, by naming again and again what names something else.
    """

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _hold_to_size(node, {})
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a name is a list or a mapping", key.start_mark
                )
            name = str(key.value)
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f'"{name}" stands there twice', key.start_mark
                )
            seen.add(name)
        return dict(super().construct_mapping(node, deep=deep))


def _hold_to_size(node: Any, sizes: dict[int, int]) -> int:
    """How many values a node is, written out.

    Raises:
        UsageError: more than can be meant.
        RecursionError: it holds itself.
    """
    if (known := sizes.get(id(node))) is not None:
        return known
    parts: list[Any] = []
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif isinstance(node, yaml.MappingNode):
        parts = [each for pair in node.value for each in pair]
    size = sizes[id(node)] = 1 + sum(_hold_to_size(each, sizes) for each in parts)
    if size > VALUES_MAX:
        line = node.start_mark.line + 1
        raise UsageError(f"line {line}: with all that it names, more than {VALUES_MAX} values")
    return size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The same for JSON."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f'"{key}" stands there twice')
        made[key] = value
    return made


def _document(path: str) -> Any:
    """What a file holds, whatever it is written in."""
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
        raise UsageError(f"{line}{error.problem}") from None
    except (AttributeError, LookupError, TypeError) as error:
        # So PyYAML fails at "!!bool maybe" and "!!timestamp soon".
        raise UsageError(f"cannot be read: a value is not what its tag says: {error}") from None
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
