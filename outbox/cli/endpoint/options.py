"""The options of an endpoint's settings, for `add` and `update`, from the table of settings.

An omitted option sets nothing: `add` uses the default, and `update` keeps the current value.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, TypeVar, get_args

import click

from outbox.core.model import compat, duration
from outbox.core.model.compat import CompatSetting
from outbox.core.model.endpoint_settings import SETTINGS
from outbox.core.model.secret_text import GivenSecret, SecretEncoding
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
from outbox.core.model.text import did_you_mean, truncate
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
_COMPAT, _COMPAT_SECRET, _COMPAT_UNTIL = "set_compat", "set_compat_secret_file", "set_compat_until"
_NONE = "none"
"""The value of --retryable with which no status is retried."""


class SecretFile(click.File):
    """A file with a secret.  No message repeats what is no file: it may be the secret itself."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: Context | None) -> IO[Any]:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            reason = getattr(error.__context__, "strerror", None) or "it cannot be opened"
            self.fail(f"{reason}; give the name of a file, or - for stdin", param, ctx)


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


def secret_options(command: Callable[..., T]) -> Callable[..., T]:
    """The options of a secret that is given; the command receives it as `secret`, or None."""

    @functools.wraps(command)
    def with_secret(
        *, secret_file: IO[str] | None, secret_encoding: SecretEncoding | None, **arguments: Any
    ) -> T:
        if secret_file is None:
            if secret_encoding is not None:
                raise UsageError("--secret-encoding: is for --secret-file")
            return command(secret=None, **arguments)
        return command(
            secret=GivenSecret(_read_secret(secret_file, "--secret-file"), secret_encoding),
            **arguments,
        )

    for option in (
        click.option(
            "--secret-encoding",
            type=click.Choice(get_args(SecretEncoding)),
            help="How the text of --secret-file is the key: its own bytes, or base64 of the key.  "
            "It is asked for if both are possible.",
        ),
        click.option(
            "--secret-file",
            type=SecretFile(),
            metavar="FILE",
            help="Sign with the secret in a file, which the receiver has already, instead of a new "
            "one: whsec_… or base64 of 24 to 64 bytes, or whsk_…; - reads stdin.",
        ),
    ):
        with_secret = option(with_secret)
    return with_secret


def _read_secret(file: IO[str], flag: str) -> str:
    """The secret in a file, without the end of its line."""
    return read_text(file, flag).rstrip("\r\n")


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
        case CompatSetting():
            note = 'Or JSON with its members: {"preset": "github", "header": "X-Acme-Signature"}.'
    return click.option(flag, _PREFIX + setting.field, help=setting.describe(note), **kind)


_FROM_FILE = click.option(
    "--headers-file",
    _HEADERS_FILE,
    type=SecretFile(),
    metavar="FILE",
    help="Read headers from a file, one per line, which keeps credentials out of the process "
    "list; - reads stdin.",
)
_COMPAT_OPTIONS = (
    click.option(
        "--compat-secret-file",
        _COMPAT_SECRET,
        type=SecretFile(),
        metavar="FILE",
        help="Secret of --compat, which the receiver has already; - reads stdin.",
    ),
    click.option(
        "--compat-until",
        _COMPAT_UNTIL,
        metavar="TIME",
        help="End of --compat: a date such as 2027-01-31, or a time with its zone.",
    ),
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
        by_field |= dict.fromkeys((_COMPAT_SECRET, _COMPAT_UNTIL), SETTINGS["compat"].section)
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

    @functools.wraps(command)
    def with_compat(*, given: dict[str, Any], **arguments: Any) -> T:
        return command(given=_with_compat(given, None), **arguments)

    return _collected(with_compat, [*map(_option, optional), _FROM_FILE, *_COMPAT_OPTIONS])


def edit_options(command: Callable[..., T]) -> Callable[..., T]:
    """Options that change an endpoint; the command receives `edit`, a function on its settings."""

    @functools.wraps(command)
    def with_edit(*, given: dict[str, Any], reset: tuple[str, ...], **arguments: Any) -> T:
        edit = functools.partial(_edited, given=given, reset=reset)
        return command(edit=edit, **arguments)

    options = [*map(_option, SETTINGS.values()), _FROM_FILE, *_COMPAT_OPTIONS, _RESET]
    return _collected(with_edit, options)


def _collected(command: Callable[..., T], options: Sequence[Any]) -> Callable[..., T]:
    @functools.wraps(command)
    def collecting(**arguments: Any) -> T:
        given = {name: arguments.pop(name) for name in list(arguments) if name.startswith(_PREFIX)}
        return command(given=_fields(given), **arguments)

    for option in reversed(options):
        collecting = option(collecting)
    return collecting


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The given options as fields of EndpointSettings; of `compat`, the given members."""
    given: dict[str, Any] = {}
    for each in SETTINGS.values():
        value = options.get(_PREFIX + each.field)
        if value is None or value == () or isinstance(each.type, HeaderMap | CompatSetting):
            continue
        if isinstance(each.type, Certificates):
            value = read_text(value, _flag(each))
        if isinstance(each.type, StatusList) and value == (_NONE,):
            value = ()
        given[each.field] = each.type.parse(
            each.name, list(value) if isinstance(value, tuple) else value
        )
    members = {} if options[_COMPAT] is None else compat.members(options[_COMPAT])
    if "secret" in members:
        raise UsageError("--compat: ps shows a secret in an argument; use --compat-secret-file")
    if (file := options[_COMPAT_SECRET]) is not None:
        members["secret"] = _read_secret(file, "--compat-secret-file")
    if options[_COMPAT_UNTIL] is not None:
        members["until"] = options[_COMPAT_UNTIL]
    if members:
        given["compat"] = members
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
    given = _with_compat(given, settings)
    if "tenant" in given:
        values["all_tenants"] = False
    elif given.get("all_tenants"):
        values["tenant"] = None
    for name, value in given.get("headers", {}).items():
        headers = {k: v for k, v in headers.items() if k.lower() != name.lower()} | {name: value}
    return replace(settings, **{**values, **given, "headers": headers})


def _with_compat(given: Mapping[str, Any], settings: EndpointSettings | None) -> dict[str, Any]:
    """Given options with a compat signature; without a preset, its other members stay."""
    if "compat" not in given:
        return dict(given)
    members, current = given["compat"], None if settings is None else settings.compat
    if "preset" not in members:
        if current is None:
            raise UsageError("--compat-secret-file, --compat-until: need --compat as well")
        members = current.public() | members
    return {**given, "compat": SETTINGS["compat"].type.parse("compat", members)}


def _resettable(name: str) -> Setting:
    """The setting of a --reset, by its name or its flag."""
    optional = {n: each for n, each in SETTINGS.items() if not each.is_required}
    by_word = optional | {_flag(each)[2:].replace("-", "_"): each for each in optional.values()}
    found = by_word.get(name.replace("-", "_"))
    if found is None:
        hint = did_you_mean(name, optional)
        raise UsageError(f'--reset: there is no setting "{truncate(name)}"; {hint}')
    return found


def _header(text: str, place: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        # Do not quote the line: it may contain a credential.
        raise UsageError(f'{place}: has no ":"; write "NAME: VALUE"')
    return name.strip(), value.strip()
