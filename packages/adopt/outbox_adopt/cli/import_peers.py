"""`outbox endpoint import`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.common import actor, print_result, run_operation
from outbox.cli.output import echo, print_changed, style
from outbox.core.model.text import count
from outbox.destinations.endpoint_validation import policy_of
from outbox.errors import UsageError
from outbox.store.connection.secrets import Vault
from outbox_adopt.peers.document import read_records
from outbox_adopt.peers.importing import import_endpoints
from outbox_adopt.peers.translation import ImportOptions

if TYPE_CHECKING:
    from outbox.config import Settings
    from outbox_adopt.peers.importing import ImportReport

_SIGNS = {"add": "+", "change": "~", "keep": "=", "not imported": "!"}
_COLOURS = {"add": "green", "change": "yellow", "keep": None, "not imported": "red"}


def _show(report: ImportReport) -> None:
    for each in report.endpoints:
        line = f"{_SIGNS[each.action]} {each.name}"
        echo(style(line, fg=_COLOURS[each.action]))
        for reason in each.begins_disabled:
            echo(f"    disabled: {reason}")
        for note in each.notes:
            echo(f"    {note}" if each.action != "not imported" else f"    {each.place}: {note}")
        print_changed(each.changed, indent=4)
    counts = [
        f"{n} {done}"
        for n, done in (
            (report.added, "added"),
            (report.changed, "changed"),
            (report.kept, "as it was"),
        )
        if n
    ]
    done = ", ".join(counts) or "none"
    echo(f"would be {done}; nothing was changed" if report.dry_run else done)
    if report.not_imported:
        echo(f"{count(report.not_imported, 'record')} not imported")


@click.command(
    "import",
    epilog="""\b
A file, which scripts of the guides collect from the API of the other sender:
  {"version": 1, "endpoints": [
    {"source": "svix", "application": {…}, "endpoint": {…}, "secret": {…}, "headers": {…}},
    {"source": "convoy", "endpoint": {…}, "subscriptions": […]},
    {"source": "outpost", "destination": {…}}]}

\b
A table, FILE.csv, has a column for each setting, and for what signs:
  name,url,tenant,types,compat,compat_secret,header:X-Api-Key
  acme.orders,https://acme.example/hooks,acme,order.* refund.done,github,hunter2,4711

\b
Examples:
  outbox endpoint import svix.json --dry-run
  outbox endpoint import svix.json --compat-until 2027-06-30
  outbox endpoint import svix.json --to http://127.0.0.1:9300/ours
  outbox endpoint import svix.json --only acme.billing

\b
What is printed:
  + added   ~ changed   = as it was   ! not imported, with the reason

Exit code 1 means that a record was not imported; the others were.
""",
)
@click.argument("path", metavar="FILE")
@click.option("--dry-run", is_flag=True, help="Print what would be imported; change nothing.")
@click.option(
    "--no-compat",
    is_flag=True,
    help="Sign as in Standard Webhooks only: no receiver checks the other sender's headers.",
)
@click.option(
    "--compat-until",
    metavar="TIME",
    help="End of the other sender's signatures: a date such as 2027-01-31, or a time with its "
    "zone.",
)
@click.option(
    "--channels",
    metavar="MEMBER",
    help="Svix: the member of your payloads that has the channels of a message. Without it, an "
    "endpoint of some channels is not imported.",
)
@click.option(
    "--to",
    metavar="URL",
    help="Send to URL/NAME in place of the customer's URL, for outbox adopt compare; without it, a "
    "later import gives endpoints the URLs of the file.",
)
@click.option("--only", metavar="NAME", multiple=True, help="Import this endpoint; repeatable.")
@print_result(_show, failed=lambda report: report.not_imported)
def command(
    settings: Settings,
    path: str,
    dry_run: bool,
    no_compat: bool,
    compat_until: str | None,
    channels: str | None,
    to: str | None,
    only: tuple[str, ...],
) -> ImportReport:
    """Add the endpoints of Svix, Convoy, Outpost or a table of your own.

    Customers notice nothing: requests have the payload as their body, and carry the signature of
    the other sender, with the secret that the customer has, beside that of Standard Webhooks.
    What could not be carried over is listed for each endpoint. One that would fail until it
    gets what is missing, or that was disabled, begins disabled: outbox endpoint enable. One
    that would get more than it did is not imported.

    An endpoint that is here already gets what its record says, so that an import can be
    repeated until the other sender is turned off. What the record does not say, and its
    state, stay.
    """
    if no_compat and compat_until is not None:
        raise UsageError("--no-compat and --compat-until exclude each other")
    try:
        return run_operation(
            settings,
            import_endpoints,
            read_records(path),
            ImportOptions(not no_compat, compat_until, channels, to, only),
            policy=policy_of(settings),
            actor=actor(),
            dry_run=dry_run,
            vault=Vault.from_settings(settings),
        )
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
