"""The options that say what an endpoint is to be, for `add` and `update`.

They are collected as the fields of EndpointSettings, so what was not said is
not there: `add` takes the default for it, `update` leaves it alone.
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
    """For how many seconds what is old is good beside what is new; 0: no longer.

    Raises:
        UsageError: the text is no time.
    """
    try:
        return duration.parse(text)
    except UsageError as error:
        raise UsageError(f"--overlap: {error}") from None


_RECEIVES, _CALLED, _FAILS = "What it receives", "How it is called", "When a delivery fails"
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
        help='Events of this type; repeatable. "*" is one segment, a last "**" the rest.  '
        "Default: everything but outbox.*.",
    ),
    click.option(
        "--filter",
        metavar="CONDITION",
        help="Of these, events whose payload meets an SQL/JSON path condition: "
        "'@.total > 100 && @.currency == \"EUR\"'.",
    ),
    click.option(
        "--tenant", metavar="TENANT", help="This tenant's events; default: those of none."
    ),
    click.option("--all-tenants", is_flag=True, help="Events of every tenant, and of none."),
    click.option(
        "--lanes",
        type=int,
        help="Requests at once, 1 to 1024; order is per key.  Default: 1.",
    ),
    click.option("--method", metavar="METHOD", help="POST, PUT or PATCH.  Default: POST."),
    click.option(
        "--header",
        multiple=True,
        metavar='"NAME: VALUE"',
        help="Sent along, in place of an event's header of that name; repeatable.",
    ),
    click.option(
        "--headers-file",
        type=click.File(),
        metavar="FILE",
        help="The same from a file with one in each line, so that credentials stand in no "
        "process list; - reads stdin.",
    ),
    click.option(
        "--connect-timeout",
        "connect_timeout_s",
        type=duration_s,
        metavar="TIME",
        help="For the name, the connection and TLS.  Default: 5s.",
    ),
    click.option(
        "--timeout",
        "total_timeout_s",
        type=duration_s,
        metavar="TIME",
        help="For the whole request.  Default: 15s.",
    ),
    click.option(
        "--in-flight-max",
        type=int,
        metavar="N",
        help="At most N requests at once, over all lanes.  Default: one for each lane.",
    ),
    click.option(
        "--rate",
        "rate_per_s",
        type=float,
        metavar="N",
        help="At most N requests begun in a second; 0.5 is one in two.  Default: no limit.",
    ),
    click.option(
        "--batch-max",
        type=int,
        metavar="N",
        help="Send up to N deliveries of a lane in one request, as a JSON array, 1 to 1000.  "
        "Default: each by itself.",
    ),
    click.option(
        "--allow-network",
        "allow_networks",
        multiple=True,
        metavar="RANGE",
        help="A private network that it may be in, with plain http and any port, such as "
        "10.1.2.0/24; repeatable.  Default: what OUTBOX_ALLOW_NETWORKS opens.",
    ),
    click.option(
        "--ca",
        type=click.File(),
        metavar="FILE",
        help="Certificates (PEM) to trust instead of the system's authorities; - reads stdin.",
    ),
    click.option(
        "--policy",
        metavar="POLICY",
        help=f"When to try again: {', '.join(PRESETS)}, values such as base=5s,factor=2,cap=1h, or "
        "plane,attempts=8.  `outbox endpoint policies` shows what comes of it.",
    ),
    click.option(
        "--retryable",
        multiple=True,
        metavar="STATUS",
        help="Answers to try again after, instead of 408, 425, 429 and 5xx; repeatable: 429, 5xx, "
        '500-504; "none"; "default".',
    ),
    click.option(
        "--on-dead-letter",
        metavar="WHAT",
        help="continue with the next delivery, or block the lane until you have seen to it.  "
        "Default: continue.",
    ),
    click.option(
        "--backlog-max",
        "backlog_count_max",
        type=int,
        metavar="N",
        help="Give up the oldest when more than N deliveries are owed.  Default: no limit.",
    ),
    click.option(
        "--backlog-age",
        "backlog_age_max_s",
        type=duration_s,
        metavar="TIME",
        help="Give up what is owed for longer than this.  Default: no limit.",
    ),
    click.option(
        "--disable-after",
        "disable_after_s",
        type=duration_s,
        metavar="TIME",
        help="Disable it after so long without a success.  Default: 3d.",
    ),
    click.option(
        "--checkpoint-every",
        "checkpoint_every_s",
        type=duration_s,
        metavar="TIME",
        help="Tell its receiver the last number of each lane so often, so that even a lost tail "
        "shows.  Default: never.",
    ),
)

_TAKE_AWAY = (
    click.option("--no-filter", is_flag=True, help="Events whatever their payload."),
    click.option("--no-tenant", is_flag=True, help="Events of no tenant."),
    click.option("--no-headers", is_flag=True, help="Without the headers it has; before --header."),
    click.option("--no-limits", is_flag=True, help="Without a limit of requests at once or rate."),
    click.option("--no-batches", is_flag=True, help="Each delivery by itself."),
    click.option("--no-networks", is_flag=True, help="Without private networks of its own."),
    click.option("--no-ca", is_flag=True, help="With the system's authorities."),
    click.option("--no-checkpoints", is_flag=True, help="Without checkpoints."),
    click.option("--no-backlog", is_flag=True, help="Without a limit of number or age."),
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
    """What is in a file.

    Raises:
        UsageError: it is not text.
    """
    try:
        return file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"{flag}: {name_of(file)}: {why}") from None


def name_of(file: IO[str]) -> str:
    """What a file is called in a message."""
    return str(getattr(file, "name", "stdin"))


def new_options(command: Callable[..., T]) -> Callable[..., T]:
    """Options of a new endpoint; the command gets `given`, its settings but name and url."""
    return _collected(command, _SETTINGS)


def edit_options(command: Callable[..., T]) -> Callable[..., T]:
    """Options of one that is there; the command gets `edit`, which changes settings."""

    @functools.wraps(command)
    def with_edit(*, given: dict[str, Any], **arguments: Any) -> T:
        return command(edit=functools.partial(_edited, given=given), **arguments)

    return _collected(with_edit, (*_SETTINGS, *_TAKE_AWAY))


def _collected(command: Callable[..., T], options: Sequence[Any]) -> Callable[..., T]:
    @functools.wraps(command)
    def collecting(**arguments: Any) -> T:
        said = {
            name: arguments.pop(name) for name in _SECTIONS if name in arguments and name != "url"
        }
        return command(given=_fields(said), **arguments)

    for option in reversed(options):
        collecting = option(collecting)
    return collecting


def _fields(said: Mapping[str, Any]) -> dict[str, Any]:
    """What was said, with the forms of the command line read."""
    given = {
        name: value
        for name, value in said.items()
        if value is not None and value is not False and value != ()
    }
    if "policy" in given:
        given["retry"] = retry_policy.parse(given.pop("policy"))
    if "ca" in given:
        given["ca"] = read_text(given["ca"], "--ca")
    lines = [("--header", line) for line in given.pop("header", ())]
    if (file := given.pop("headers_file", None)) is not None:
        text = read_text(file, "--headers-file").splitlines()
        lines += [
            (f"--headers-file: {name_of(file)}, line {n}", line) for n, line in enumerate(text, 1)
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
    """Settings with what was given, and without what was taken away."""
    values = dict(given)
    clash = [
        ("--no-filter", "--filter", "filter"),
        ("--no-tenant", "--tenant", "tenant"),
        ("--no-tenant", "--all-tenants", "all_tenants"),
        ("--no-ca", "--ca", "ca"),
    ]
    for no, yes, field in clash:
        if no[2:].replace("-", "_") in values and field in values:
            raise UsageError(f"say one of {no} and {yes}, not both")
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
        # Not what it is instead: that may be the credential.
        raise UsageError(f'{place}: there is no ":" in it; it must look like "NAME: VALUE"')
    return name.strip(), value.strip()
