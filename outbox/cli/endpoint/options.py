"""The options of an endpoint's settings, for `add` and `update`.

They are collected as the fields of EndpointSettings.  An omitted option has no entry:
`add` uses its default, `update` keeps the current value.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from outbox.cli.common import duration_s
from outbox.core.model import duration, retry_policy
from outbox.core.model.retry_policy import PRESETS
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from click import Context, HelpFormatter

    from outbox.core.model.endpoint import EndpointSettings

T = TypeVar("T")


def overlap_s(text: str) -> float:
    """Parse --overlap: how many seconds the old secret or token stays valid; 0: not at all.

    Raises:
        UsageError: the text is no duration.
    """
    try:
        return duration.parse(text)
    except UsageError as error:
        raise UsageError(f"--overlap: {error}") from None


_RECEIVES, _CALLED, _FAILS = "Subscription", "Requests", "Failures"
_SECTIONS = {
    "types": _RECEIVES,
    "filter": _RECEIVES,
    "no_filter": _RECEIVES,
    "tenant": _RECEIVES,
    "all_tenants": _RECEIVES,
    "no_tenant": _RECEIVES,
    "lanes": _RECEIVES,
    "url": _CALLED,
    "method": _CALLED,
    "header": _CALLED,
    "headers_file": _CALLED,
    "no_headers": _CALLED,
    "connect_timeout_s": _CALLED,
    "total_timeout_s": _CALLED,
    "in_flight_max": _CALLED,
    "rate_per_s": _CALLED,
    "batch_max": _CALLED,
    "no_batches": _CALLED,
    "keep_alive": _CALLED,
    "no_limits": _CALLED,
    "allow_networks": _CALLED,
    "no_networks": _CALLED,
    "ca": _CALLED,
    "no_ca": _CALLED,
    "policy": _FAILS,
    "retryable": _FAILS,
    "on_dead_letter": _FAILS,
    "backlog_count_max": _FAILS,
    "backlog_age_max_s": _FAILS,
    "no_backlog": _FAILS,
    "disable_after_s": _FAILS,
    "checkpoint_every_s": _CALLED,
    "no_checkpoints": _CALLED,
}

_SETTINGS = (
    click.option(
        "--type",
        "types",
        multiple=True,
        metavar="PATTERN",
        help='Receive events of this type; repeatable. "*" matches one segment, a last "**" the '
        "rest.  Default: every type except outbox.*.",
    ),
    click.option(
        "--filter",
        metavar="CONDITION",
        help="Filter events by payload with a SQL/JSON path condition: "
        "'@.total > 100 && @.currency == \"EUR\"'.",
    ),
    click.option(
        "--tenant",
        metavar="TENANT",
        help="Receive the events of this tenant.  Default: events without a tenant.",
    ),
    click.option(
        "--all-tenants",
        is_flag=True,
        help="Receive the events of all tenants, and events without one.",
    ),
    click.option(
        "--lanes",
        type=int,
        help="Number of lanes, 1 to 1024.  A lane sends one request at a time; events with the "
        "same key share a lane.  Default: 1.",
    ),
    click.option(
        "--method", metavar="METHOD", help="HTTP method: POST, PUT or PATCH.  Default: POST."
    ),
    click.option(
        "--header",
        multiple=True,
        metavar='"NAME: VALUE"',
        help="Send this header, in place of an event's header of that name; repeatable.",
    ),
    click.option(
        "--headers-file",
        type=click.File(),
        metavar="FILE",
        help="Read headers from a file, one per line, which keeps credentials out of the process "
        "list; - reads stdin.",
    ),
    click.option(
        "--connect-timeout",
        "connect_timeout_s",
        type=duration_s,
        metavar="TIME",
        help="Connect time-out, including DNS and TLS.  Default: 5s.",
    ),
    click.option(
        "--timeout",
        "total_timeout_s",
        type=duration_s,
        metavar="TIME",
        help="Time-out of the whole request.  Default: 15s.",
    ),
    click.option(
        "--in-flight-max",
        type=int,
        metavar="N",
        help="Maximum concurrent requests, over all lanes.  Default: one per lane.",
    ),
    click.option(
        "--rate",
        "rate_per_s",
        type=float,
        metavar="N",
        help="Maximum requests per second; 0.5 is one every two seconds.  Default: no limit.",
    ),
    click.option(
        "--batch-max",
        type=int,
        metavar="N",
        help="Send up to N deliveries of a lane in one request, as a JSON array, 1 to 1000.  "
        "Default: one delivery per request.",
    ),
    click.option(
        "--keep-alive",
        type=click.Choice(["on", "off"]),
        help="off: send each request on a connection of its own.  Default: on.",
    ),
    click.option(
        "--allow-network",
        "allow_networks",
        multiple=True,
        metavar="RANGE",
        help="Private network that the endpoint may be in, also with plain http and any port, such "
        "as 10.1.2.0/24; repeatable.  Default: OUTBOX_ALLOW_NETWORKS.",
    ),
    click.option(
        "--ca",
        type=click.File(),
        metavar="FILE",
        help="CA certificates (PEM) to trust instead of the system's; - reads stdin.",
    ),
    click.option(
        "--policy",
        metavar="POLICY",
        help=f"Retry policy: {', '.join(PRESETS)}, values such as base=5s,factor=2,cap=1h, "
        "or both: stepped,attempts=8.  `outbox endpoint policies` shows the schedule.  "
        "Default: standard.",
    ),
    click.option(
        "--retryable",
        multiple=True,
        metavar="STATUS",
        help="Status to retry, instead of 408, 425, 429 and 5xx; repeatable: 429, 5xx, 500-504, "
        '"none" or "default".',
    ),
    click.option(
        "--on-dead-letter",
        metavar="WHAT",
        help="After a dead letter: continue with the next delivery, or block the lane until it is "
        "resumed.  Default: continue.",
    ),
    click.option(
        "--backlog-max",
        "backlog_count_max",
        type=int,
        metavar="N",
        help="Dead-letter the oldest deliveries above N pending ones.  Default: no limit.",
    ),
    click.option(
        "--backlog-age",
        "backlog_age_max_s",
        type=duration_s,
        metavar="TIME",
        help="Dead-letter deliveries that are pending for longer.  Default: no limit.",
    ),
    click.option(
        "--disable-after",
        "disable_after_s",
        type=duration_s,
        metavar="TIME",
        help="Disable the endpoint after this time without a success.  Default: 3d.",
    ),
    click.option(
        "--checkpoint-every",
        "checkpoint_every_s",
        type=duration_s,
        metavar="TIME",
        help="Interval for sending each lane's last sequence number, so that the receiver detects "
        "missing events at the end of a lane.  Default: never.",
    ),
)

_CLEARING_OPTIONS = (
    click.option("--no-filter", is_flag=True, help="Remove the filter."),
    click.option("--no-tenant", is_flag=True, help="Receive events without a tenant."),
    click.option(
        "--no-headers", is_flag=True, help="Remove all headers, before --header is applied."
    ),
    click.option("--no-limits", is_flag=True, help="Remove --in-flight-max and --rate."),
    click.option("--no-batches", is_flag=True, help="Send one delivery per request."),
    click.option("--no-networks", is_flag=True, help="Remove all --allow-network ranges."),
    click.option("--no-ca", is_flag=True, help="Trust the system's CA certificates."),
    click.option("--no-checkpoints", is_flag=True, help="Send no checkpoints."),
    click.option("--no-backlog", is_flag=True, help="Remove --backlog-max and --backlog-age."),
)


class Command(click.Command):
    """A command whose help groups the settings of an endpoint."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {
            title: [] for title in (_RECEIVES, _CALLED, _FAILS, "Options")
        }
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                sections[_SECTIONS.get(param.name or "", "Options")].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def read_text(file: IO[str], flag: str) -> str:
    """Read a text file that a flag names.

    Raises:
        UsageError: the file cannot be read, or is not text.
    """
    try:
        return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UsageError(f"{flag}: {file_name(file)}: {reason}") from None


def file_name(file: IO[str]) -> str:
    """The name of a file in a message."""
    return str(getattr(file, "name", "stdin"))


def new_options(command: Callable[..., T]) -> Callable[..., T]:
    """Options of a new endpoint; the command receives its settings as `given`."""
    return _collected(command, _SETTINGS)


def edit_options(command: Callable[..., T]) -> Callable[..., T]:
    """Options that change an endpoint; the command receives `edit`, a function on its settings."""

    @functools.wraps(command)
    def with_edit(*, given: dict[str, Any], **arguments: Any) -> T:
        return command(edit=functools.partial(_edited, given=given), **arguments)

    return _collected(with_edit, (*_SETTINGS, *_CLEARING_OPTIONS))


def _collected(command: Callable[..., T], options: Sequence[Any]) -> Callable[..., T]:
    @functools.wraps(command)
    def collecting(**arguments: Any) -> T:
        options_given = {
            name: arguments.pop(name) for name in _SECTIONS if name in arguments and name != "url"
        }
        return command(given=_fields(options_given), **arguments)

    for option in reversed(options):
        collecting = option(collecting)
    return collecting


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The given options as fields of EndpointSettings."""
    given = {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != ()
    }
    if "policy" in given:
        given["retry"] = retry_policy.parse(given.pop("policy"))
    if "keep_alive" in given:
        given["keep_alive"] = given["keep_alive"] == "on"
    if "ca" in given:
        given["ca"] = read_text(given["ca"], "--ca")
    lines = [("--header", line) for line in given.pop("header", ())]
    if (file := given.pop("headers_file", None)) is not None:
        text = read_text(file, "--headers-file").splitlines()
        lines += [
            (f"--headers-file: {file_name(file)}, line {n}", line) for n, line in enumerate(text, 1)
        ]
    if lines:
        given["headers"] = dict(_header(line, place) for place, line in lines if line.strip())
    match given.get("retryable"):
        case ("default",):
            given["retryable"] = None
        case ("none",):
            given["retryable"] = ()
    return given


def _edited(settings: EndpointSettings, *, given: Mapping[str, Any]) -> EndpointSettings:
    """Apply the given options to settings; the --no-… options clear a value first."""
    values = dict(given)
    clash = [
        ("--no-filter", "--filter", "filter"),
        ("--no-tenant", "--tenant", "tenant"),
        ("--no-tenant", "--all-tenants", "all_tenants"),
        ("--no-ca", "--ca", "ca"),
    ]
    for no, yes, field in clash:
        if no[2:].replace("-", "_") in values and field in values:
            raise UsageError(f"{no} and {yes} exclude each other")
    if values.pop("no_filter", False):
        values["filter"] = None
    if values.pop("no_tenant", False):
        values |= {"tenant": None, "all_tenants": False}
    elif "tenant" in values:
        values.setdefault("all_tenants", False)
    elif "all_tenants" in values:
        values["tenant"] = None
    if values.pop("no_checkpoints", False):
        values = {"checkpoint_every_s": None, **values}
    if values.pop("no_ca", False):
        values["ca"] = None
    if values.pop("no_limits", False):
        values = {"in_flight_max": None, "rate_per_s": None, **values}
    if values.pop("no_batches", False):
        values = {"batch_max": None, **values}
    if values.pop("no_networks", False):
        values = {"allow_networks": (), **values}
    if values.pop("no_backlog", False):
        values = {"backlog_count_max": None, "backlog_age_max_s": None, **values}
    kept = {} if values.pop("no_headers", False) else dict(settings.headers)
    for name, value in values.get("headers", {}).items():
        kept = {k: v for k, v in kept.items() if k.lower() != name.lower()} | {name: value}
    return replace(settings, **values | {"headers": kept})


def _header(text: str, place: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        # Do not quote the line: it may contain a credential.
        raise UsageError(f'{place}: has no ":"; write "NAME: VALUE"')
    return name.strip(), value.strip()
