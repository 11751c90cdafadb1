"""The options of an endpoint's settings, for `add` and `update`, from the table of settings.

An omitted option sets nothing: `add` uses the default, and `update` keeps the current value.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, TypeVar, get_args

import click

from outbox.core.model import duration
from outbox.core.model.endpoint_settings import SETTINGS
from outbox.core.model.setting import Section
from outbox.core.model.setting_types import (
    Certificates,
    Choice,
    Count,
    HeaderMap,
    Rate,
    Retry,
    StatusList,
    Switch,
    TextList,
)
from outbox.core.model.text import closest, truncate
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from click import Context, HelpFormatter

    from outbox.core.model.endpoint_settings import EndpointSettings
    from outbox.core.model.setting import Setting

T = TypeVar("T")

_PREFIX = "set_"
"""Parameters of settings have this prefix and the name of the field."""
_HEADERS_FILE = "set_headers_file"
_NONE = "none"
"""The value of --retryable with which no status is retried."""


def overlap_option(what: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """The option --overlap: how long `what`; the command receives seconds as `overlap_s`."""

    def parse(_: click.Context, __: click.Parameter, text: str) -> float:
        try:
            return duration.parse(text)
        except UsageError as error:
            raise UsageError(f"--overlap: {error}") from None

    return click.option(
        "--overlap",
        "overlap_s",
        default="24h",
        show_default=True,
        metavar="TIME",
        callback=parse,
        help=f"How long {what}; 0: not at all.",
    )


def _flag(setting: Setting) -> str:
    """The flag of a setting; one that is repeated is in the singular."""
    name = setting.name.replace("_", "-")
    repeated = isinstance(setting.type, TextList | HeaderMap)
    return f"--{name.removesuffix('s') if repeated else name}"


def _option(setting: Setting) -> Any:
    flag, note = _flag(setting), ""
    kind: dict[str, Any] = {"metavar": setting.type.metavar}
    match setting.type:
        case Switch():
            flag, kind = f"{flag}/--no-{flag.removeprefix('--')}", {"default": None}
        case TextList() | HeaderMap():
            kind["multiple"] = True
            note = "Repeatable."
            if isinstance(setting.type, StatusList):
                note += f"  {_NONE}: no status."
        case Choice(choices):
            kind["metavar"] = "|".join(choices)
        case Certificates():
            kind["type"] = click.File()
            note = "- reads stdin."
        case Count():
            kind["type"] = int
        case Rate():
            kind["type"] = float
        case Retry():
            note = "`outbox endpoint policies` shows the schedule."
    return click.option(flag, _PREFIX + setting.field, help=setting.describe(note), **kind)


_FROM_FILE = click.option(
    "--headers-file",
    _HEADERS_FILE,
    type=click.File(),
    metavar="FILE",
    help="Read headers from a file, one per line, which keeps credentials out of the process "
    "list; - reads stdin.",
)
_RESET = click.option(
    "--reset",
    multiple=True,
    metavar="SETTING",
    help="Reset a setting to its default, by its name in `outbox endpoint show`; repeatable.  "
    "Headers are reset before --header is applied.",
)


class Command(click.Command):
    """A command whose help groups the settings of an endpoint."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {
            title: [] for title in (*get_args(Section), "Options")
        }
        by_field = {_PREFIX + each.field: each.section for each in SETTINGS.values()}
        by_field[_HEADERS_FILE] = SETTINGS["headers"].section
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                sections[by_field.get(param.name or "", "Options")].append(record)
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
    optional = [each for each in SETTINGS.values() if not each.is_required]
    return _collected(command, [*map(_option, optional), _FROM_FILE])


def edit_options(command: Callable[..., T]) -> Callable[..., T]:
    """Options that change an endpoint; the command receives `edit`, a function on its settings."""

    @functools.wraps(command)
    def with_edit(*, given: dict[str, Any], reset: tuple[str, ...], **arguments: Any) -> T:
        edit = functools.partial(_edited, given=given, reset=reset)
        return command(edit=edit, **arguments)

    return _collected(with_edit, [*map(_option, SETTINGS.values()), _FROM_FILE, _RESET])


def _collected(command: Callable[..., T], options: Sequence[Any]) -> Callable[..., T]:
    @functools.wraps(command)
    def collecting(**arguments: Any) -> T:
        given = {name: arguments.pop(name) for name in list(arguments) if name.startswith(_PREFIX)}
        return command(given=_fields(given), **arguments)

    for option in reversed(options):
        collecting = option(collecting)
    return collecting


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The given options as fields of EndpointSettings."""
    given: dict[str, Any] = {}
    for each in SETTINGS.values():
        value = options.get(_PREFIX + each.field)
        if value is None or value == () or isinstance(each.type, HeaderMap):
            continue
        if isinstance(each.type, Certificates):
            value = read_text(value, _flag(each))
        if isinstance(each.type, StatusList) and value == (_NONE,):
            value = ()
        given[each.field] = each.type.parse(
            each.name, list(value) if isinstance(value, tuple) else value
        )
    lines = [("--header", line) for line in options[f"{_PREFIX}headers"]]
    if (file := options[_HEADERS_FILE]) is not None:
        text = read_text(file, "--headers-file").splitlines()
        lines += [
            (f"--headers-file: {file_name(file)}, line {n}", line) for n, line in enumerate(text, 1)
        ]
    if lines:
        given["headers"] = dict(_header(line, place) for place, line in lines if line.strip())
    return given


def _edited(
    settings: EndpointSettings, *, given: Mapping[str, Any], reset: Sequence[str]
) -> EndpointSettings:
    """Apply the given options to settings, after settings were reset."""
    values: dict[str, Any] = {}
    headers = {} if "headers" in reset else dict(settings.headers)
    for each in map(_resettable, reset):
        if each.field in given and each.name != "headers":
            raise UsageError(f"--reset {each.name} and {_flag(each)} exclude each other")
        values[each.field] = each.default
    if "tenant" in given:
        values["all_tenants"] = False
    elif given.get("all_tenants"):
        values["tenant"] = None
    for name, value in given.get("headers", {}).items():
        headers = {k: v for k, v in headers.items() if k.lower() != name.lower()} | {name: value}
    return replace(settings, **{**values, **given, "headers": headers})


def _resettable(name: str) -> Setting:
    """The setting of a --reset, by its name or its flag."""
    optional = {n: each for n, each in SETTINGS.items() if not each.is_required}
    by_word = optional | {_flag(each)[2:].replace("-", "_"): each for each in optional.values()}
    found = by_word.get(name.replace("-", "_"))
    if found is None:
        near = closest(name, optional)
        hint = f'did you mean "{near}"?' if near else f"there are {', '.join(optional)}"
        raise UsageError(f'--reset: there is no setting "{truncate(name)}"; {hint}')
    return found


def _header(text: str, place: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        # Do not quote the line: it may contain a credential.
        raise UsageError(f'{place}: has no ":"; write "NAME: VALUE"')
    return name.strip(), value.strip()
