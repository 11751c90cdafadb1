"""`outbox apply`: apply endpoints from a declaration file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from outbox.cli.common import (
    actor,
    print_result,
    run_operation,
    warn,
    warn_about_networks,
)
from outbox.cli.document import read_document
from outbox.cli.output import echo, print_changed, style
from outbox.core.model import endpoint_config
from outbox.core.model.endpoint_settings import WARNED_OF
from outbox.core.model.text import count
from outbox.destinations.endpoint_validation import check_declared, policy_of
from outbox.errors import UsageError
from outbox.operations.endpoints.apply import apply_file
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox.operations.endpoints.apply import ApplyReport

_SIGNS = {"add": "+", "change": "~", "remove": "-", "keep": "="}
_COLOURS = {"add": "green", "change": "yellow", "remove": "red", "keep": None}


def _show(report: ApplyReport) -> None:
    for step in report.endpoints:
        line = f"{_SIGNS[step.action]} {step.name}"
        if step.pending:
            line += f" (dead-letters {count(step.pending, 'delivery')})"
        echo(style(line, fg=_COLOURS[step.action]))
        print_changed(step.changed, indent=4)
        if step.secret is not None:
            echo(f"    secret: {step.secret}")
    if report.not_in_the_file:
        names = " ".join(report.not_in_the_file)
        echo(f"not in the file, unchanged (--prune removes them): {names}")
    changes = count(report.changes, "endpoint")
    if not report.changes:
        echo("nothing to change")
    elif report.dry_run:
        echo(f"{changes} would change; nothing was changed")
    else:
        echo(f"{changes} changed")
    if any(step.secret for step in report.endpoints):
        echo("Save the secrets now; they are not shown again.", err=True)


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
      from: 2h                    # only when it is added: earlier events come first
      disabled: true              # only when it is added: it gets nothing until it is enabled
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
@click.option(
    "--hide-secrets",
    is_flag=True,
    help="Do not print the signing secrets of new endpoints, where the output goes to a log; "
    "`outbox endpoint rotate-secret` prints others.",
)
@print_result(_show)
def command(
    settings: Settings,
    path: str,
    dry_run: bool,
    prune: bool,
    dead_letter: bool,
    hide_secrets: bool,
) -> ApplyReport:
    """Apply endpoints from a file, all of them or none.

    Omitted settings have their defaults, so applying a file twice changes nothing.
    An endpoint is identified by its id, if the file has one, or else by its name; with
    an id, a different name renames it. Signing secrets of new endpoints are shown
    once. The state (paused, disabled) is not part of the file, and stays.

    `secret` is a signing secret that the receiver has already. A different one rotates
    it: the old one signs as well for a day. `compat` may have a `secret`, too.
    """
    if dead_letter and not prune:
        raise UsageError("--dead-letter requires --prune")
    policy, vault = policy_of(settings), Vault.from_settings(settings)
    try:
        declared = endpoint_config.parse_file(read_document(path))
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
        raise UsageError(f"{path}: {error}") from error
    changed = {
        step.name: None if step.action == "add" else step.changed for step in report.endpoints
    }
    for each in declared:
        names = changed.get(each.settings.name, ())
        if names is None or "allow_networks" in names:
            warn_about_networks(f"{each.place}.allow_networks", each.settings.allow_networks)
        for warning in each.settings.warnings if names is None or WARNED_OF & {*names} else ():
            warn(f"{each.place}.{warning}")
    if hide_secrets:
        steps = tuple(replace(step, secret=None) for step in report.endpoints)
        report = replace(report, endpoints=steps)
    return report
