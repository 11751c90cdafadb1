"""`outbox endpoint add` and `outbox endpoint update`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.common import (
    actor,
    print_result,
    run_operation,
    warn,
    warn_about_networks,
)
from outbox.cli.endpoint.group import command
from outbox.cli.endpoint.options import Command, edit_options, new_options, secret_options
from outbox.cli.endpoint.shown_once import note_shown_once, secret_row
from outbox.cli.output import age, echo, emit_pairs, print_changed
from outbox.core.model.destination import is_stream
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.start import parse_start
from outbox.core.model.text import count
from outbox.destinations.descriptions import describe_destinations
from outbox.destinations.endpoint_validation import (
    check_settings,
    is_open_without_setting,
    policy_of,
)
from outbox.errors import UsageError
from outbox.network.egress import plain_http_warning
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.feeds.starts import StartPreview, preview_start
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.config import Settings
    from outbox.core.model.secret_text import GivenSecret
    from outbox.core.model.start import Start
    from outbox.operations.endpoints.changes import NewEndpoint, Updated
    from outbox.operations.lane_backlogs import PendingAhead


def _parse_start(_: click.Context, __: click.Parameter, text: str | None) -> Start | None:
    """Parse a start, or the first line of a file that has it."""
    if text is None:
        return None
    try:
        if text.startswith("@"):
            path, text = text[1:], Path(text[1:]).read_text().strip()
            if not text:
                raise click.BadParameter(f"{path} is empty; did outbox snapshot fail?")
        return parse_start(text)
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}") from None
    except (UsageError, UnicodeDecodeError) as error:
        raise click.BadParameter(str(error).removeprefix("from: ")) from None


def _show_added(added: NewEndpoint | StartPreview) -> None:
    if isinstance(added, StartPreview):
        echo(
            f'endpoint "{added.name}" would begin after batch {added.batch}, with '
            f"{count(added.events, 'event')} of all types sequenced since"
        )
        if added.matching is not None:
            echo(f"{count(added.matching, 'event')} would be sent; nothing was changed")
        return
    if is_stream(added.url):
        # Messages of a broker are not signed.
        fields = ("id", "name", "url", "types", "lanes")
        emit_pairs([(each, getattr(added, each)) for each in fields])
        echo(
            f"Credentials: outbox endpoint credentials {shlex.quote(added.name)} FILE.  To examine "
            f"the broker: outbox endpoint test {shlex.quote(added.name)}",
            err=True,
        )
        return
    emit_pairs(
        [
            ("id", added.id),
            ("name", added.name),
            ("url", added.url),
            ("types", added.types),
            ("lanes", added.lanes),
            secret_row(added.secret),
        ]
    )
    if added.events_before is not None:
        echo(
            f"It first gets what matches of {count(added.events_before, 'event')}; see the "
            f"progress: outbox endpoint show {shlex.quote(added.name)}",
            err=True,
        )
    note_shown_once(added.secret)


def _show_updated(done: Updated) -> None:
    if not done.changed:
        echo(f'endpoint "{done.name}" already has these settings; nothing was changed')
    else:
        old_name = done.changed.get("name", (done.name,))[0]
        echo(f'updated endpoint "{old_name}"')
        print_changed(done.changed, indent=2)
        if done.ahead is not None:
            echo(_describe(done.ahead, done.name))


def _describe(ahead: PendingAhead, name: str) -> str:
    """What goes before the events that the new lanes get."""
    if not ahead.deliveries:
        return "nothing is pending; events from now on go through the new lanes"
    deliveries, lanes = count(ahead.deliveries, "pending delivery"), count(ahead.lanes, "lane")
    verb = "goes" if ahead.deliveries == 1 else "go"
    time = "" if ahead.seconds is None else f", in about {age(ahead.seconds)}"
    return (
        f"{deliveries} {verb} first, through {lanes}{time}; newer events wait for that in the new "
        f"lanes: outbox endpoint show {shlex.quote(name)}"
    )


class _Add(Command):
    """Its help lists the destinations that are installed."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Destinations"):
            formatter.write_dl([(each.title, each.example) for each in describe_destinations()])
        super().format_epilog(ctx, formatter)


@command.command(
    cls=_Add,
    epilog="""\b
Examples:
  outbox endpoint add billing https://example.com/hooks --type "order.*"
  outbox endpoint add audit https://audit.example.com/ --all-tenants --lanes 8 --json
  outbox endpoint add large https://example.com/ --filter "@.total > 1000" --retry patient
  outbox endpoint add crm https://example.com/in --headers-file crm.headers
  outbox endpoint add acme https://acme.example/in --secret-file acme.secret
  outbox endpoint add hub https://hub.example/ --compat github --compat-secret-file hub.secret
  outbox endpoint add search https://example.com/index --from @position.txt
  OUTBOX_ALLOW_NETWORKS=127.0.0.0/8 outbox endpoint add dev http://127.0.0.1:8080/
""",
)
@click.argument("name")
@click.argument("url")
@new_options
@click.option(
    "--ed25519",
    is_flag=True,
    help="Sign with an Ed25519 key, and show its public key, instead of a shared secret.",
)
@secret_options
@click.option(
    "--from",
    "start",
    metavar="START",
    callback=_parse_start,
    help="Send what was published since then first, in order and without a gap or a copy: the "
    "position of a snapshot (see outbox snapshot; @FILE reads it), a time or an age, such as "
    "2026-01-31T12:00Z or 2h, or beginning, for all that is kept.",
)
@click.option(
    "--dry-run", is_flag=True, help="With --from: only show how many events that would be."
)
@click.option(
    "--count",
    "matching",
    is_flag=True,
    help="With --dry-run: count those that match, too, which reads all of them.",
)
@print_result(_show_added)
def add(
    settings: Settings,
    name: str,
    url: str,
    given: dict[str, Any],
    ed25519: bool,
    secret: GivenSecret | None,
    start: Start | None,
    dry_run: bool,
    matching: bool,
) -> NewEndpoint | StartPreview:
    """Add an endpoint, and show its signing secret once.

    The endpoint receives events published from now on. Without a running relay, it
    also receives events that are not sequenced yet. URL may name the streams of a
    broker, whose messages are not signed.
    """
    endpoint_settings = EndpointSettings(name=name, url=url, **given)
    check_settings(endpoint_settings, policy_of(settings))
    if dry_run or matching:
        if start is None or not dry_run:
            raise click.UsageError("--dry-run is for --from, and --count for --dry-run")
        return run_operation(settings, preview_start, endpoint_settings, start, matching=matching)
    vault = Vault.from_settings(settings)

    added = run_operation(
        settings,
        endpoint_changes.add_endpoint,
        endpoint_settings,
        actor=actor(),
        vault=vault,
        ed25519=ed25519,
        secret=secret,
        start=start,
    )
    warn_about_networks("--allow-network", endpoint_settings.allow_networks)
    if (reason := plain_http_warning(url)) is not None:
        warn(reason)
    elif not is_open_without_setting(endpoint_settings):
        warn(
            "only OUTBOX_ALLOW_NETWORKS opens this address: set it for every relay, too, or give "
            "the endpoint --allow-network"
        )
    for warning in added.warnings:
        warn(warning)
    if added.waiting and start is None:
        verb = "is" if added.waiting == 1 else "are"
        warn(
            f"{count(added.waiting, 'event')} {verb} not sequenced yet; "
            "this endpoint also receives those that match"
        )
    return added


@command.command(
    cls=Command,
    epilog="""\b
Examples:
  outbox endpoint update billing --type "order.*" --type refund.done
  outbox endpoint update billing --retry stepped,attempts=8 --timeout 30s
  outbox endpoint update billing --name invoices       keeps the id
  outbox endpoint update billing --lanes 8             after the old lanes are drained
""",
)
@click.argument("name")
@edit_options
@print_result(_show_updated)
def update(
    settings: Settings, name: str, edit: Callable[[EndpointSettings], EndpointSettings]
) -> Updated:
    """Change an endpoint; omitted settings stay.

    Subscription changes apply to new events; pending deliveries are still sent. All
    other settings apply from the next attempt. --type, --allow-network and
    --retryable replace the list, --header replaces one header.
    """
    policy, vault = policy_of(settings), Vault.from_settings(settings)
    opened: list[str] = []

    def edited(current: EndpointSettings) -> EndpointSettings:
        changed = edit(current)
        check_settings(changed, policy, current)
        opened[:] = [each for each in changed.allow_networks if each not in current.allow_networks]
        return changed

    done = run_operation(
        settings, endpoint_changes.update_endpoint, name, edited, actor=actor(), vault=vault
    )
    warn_about_networks("--allow-network", opened)
    for warning in done.warnings:
        warn(warning)
    return done
