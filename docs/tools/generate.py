"""Reference pages that are generated from code: commands, settings, metrics, SQL and errors.

A group of commands, such as `outbox endpoint`, has a page of its own; the other commands are on the
page of their section in `outbox --help`.

`python -m docs.tools.generate` writes them; a test compares the files with the generated text.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
from annotated_types import Ge, Gt, Le

from docs.tools import schema_page
from outbox.cli.main import COMMANDS, PROGRAM, CommandEntry, cli
from outbox.config import INTERNAL_FIELDS, Settings, readers_of, secret_fields, variable_of
from outbox.core.model.dead_letter_reason import DeadLetterReason
from outbox.core.model.setting_types import OTHERS
from outbox.errors import OutboxError
from outbox.setting_sources import FILE_SUFFIX
from outbox.telemetry.catalogue import CATALOGUE, Metric, MetricKind
from outbox_api.problem import ProblemKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pydantic.fields import FieldInfo

REFERENCE = Path(__file__).parents[1] / "reference"
HELP_WIDTH = 100

COMMANDS_HEAD = """\
# Command line

Every command with its arguments and options, as `--help` prints them.

Exit codes: 0 done; 1 the command ran and found a problem; 2 wrong usage; 3 it could not run.
Every listing has `--json`. A shell
[completes](../howto/install.md#completion-in-a-shell) commands and options.
"""

COMMANDS_PAGE_HEAD = """\
# {title}

The arguments and options, as `--help` prints them. [All commands](../command-line.md)
"""

SETTINGS_HEAD = """\
# Settings

Flags, then `OUTBOX_*` variables, then `outbox.toml`. A secret can also be read from a file:
`OUTBOX_DSN_FILE` is the path of a file with the DSN, which is [read again][rotate] after a
rotation. In `outbox.toml` a setting has the name of its variable in lower case, without `outbox_`.
The [commands](command-line.md) have the flags.

[rotate]: ../howto/encrypt-secrets.md#rotate-a-password-or-a-key

An unknown `OUTBOX_*` variable is an error, except those that Kubernetes sets for a Service
(`OUTBOX_SERVICE_HOST`, `OUTBOX_PORT=tcp://…`). An `outbox.toml` in the working directory is
refused if it belongs to another user than this one or root, or if every user may write to it.
One that `--config` or `OUTBOX_CONFIG` names is read regardless of its owner.

"Read by" names the processes that need a setting: the relay, the [API](../howto/run-the-api.md),
which a relay starts with the settings that it has itself, or the other commands.

| Variable | Default | Values | Read by | Description |
|---|---|---|---|---|
"""

SETTINGS_FOOT = """
Without `OUTBOX_DSN`, `DATABASE_URL` or libpq's `PG*` variables select the database.
`OUTBOX_CONFIG` names another `outbox.toml`; `OUTBOX_DEBUG=1` shows tracebacks.
"""

METRICS_HEAD = f"""\
# Metrics

The metrics of `outbox relay`. Prometheus scrapes `/metrics` of the health listener
(`outbox relay --health 127.0.0.1:9090`). With `OTEL_EXPORTER_OTLP_ENDPOINT` the relay also
pushes them by OTLP. Units are UCUM's; a unit in braces is a count.

`endpoint` is the name of an endpoint, for at most `OUTBOX_METRICS_ENDPOINTS_MAX`
endpoints of a replica (default: 100); the others are aggregated as `{OTHERS}`. This bounds the
number of series.

Counters and histograms are per replica and start with its process: sum them over the
replicas. Gauges of lanes and endpoints cover the endpoints that the replica owns. Only the
leader reports the metrics that say so. `outbox.api.*` are of the API that the relay has started;
they start again with its process.

| OpenTelemetry | Prometheus | Kind | Unit | Attributes | Description |
|---|---|---|---|---|---|
"""

METRICS_FOOT = """
Prometheus also gets `target_info` (the version and the replica's name) and process metrics
(`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds`).
"""

ERRORS_HEAD = """\
# Errors

Every error is one line that says what is wrong and what to do. After it, the command line names the
page that explains the error, if there is one.

## Dead-letter reasons

The `reason` of a dead letter, in `outbox dead list`, the API, metrics and the page.
[Replay dead letters](../howto/replay-dead-letters.md) has the repair.
"""

REASON_MEANINGS: dict[DeadLetterReason, str] = {
    "refused": "The receiver responded with a status that is not retried, such as 422",
    "exhausted": "The attempts or the time of the retry policy are used up",
    "expired": "The event's `expires_at` passed before it was delivered",
    "erased": "Its payload was erased by `outbox erase` or by retention",
    "missing": "Its event is gone, although nothing erased it; a replay searches for it again",
    "skipped": "An operator skipped it",
    "backlog": "The endpoint's `--backlog-max` or `--backlog-age` was exceeded",
    "adopted": "`outbox endpoint adopt` went on with a broker's stream that does not match",
    "disabled": "The endpoint was disabled, by an operator, a 410, or `--disable-after`",
    "removed": "The endpoint was removed with `--dead-letter`",
}

EXIT_CODES_TEXT = """
## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | the command ran and found a problem |
| 2 | wrong usage: an argument, a setting, a name, or a state that does not allow the change |
| 3 | it could not run: the database, the schema or a file is missing |
| 130 | interrupted |

## Exceptions

`outbox.publish` and the other public functions raise these classes of the module `outbox.errors`.

| exception | is a | exit code | meaning |
|---|---|---|---|
"""

PROBLEMS_HEAD = """
## Problems of the API

Error responses are [RFC 9457](https://www.rfc-editor.org/rfc/rfc9457) problem details. `type` is
stable and for programs; `detail` is for people and may change.

| type | status | title |
|---|---|---|
"""


def commands_index() -> str:
    """The commands with a link to the page of each."""
    text = COMMANDS_HEAD
    for section in dict.fromkeys(entry.section for entry in COMMANDS):
        text += f"\n## {section}\n\n| command | what it does |\n|---|---|\n"
        for entry in COMMANDS:
            if entry.section == section:
                link = f"commands/{_slug(_title_of(entry))}.md#{PROGRAM}-{entry.name}"
                text += f"| [`{PROGRAM} {entry.name}`]({link}) | {entry.help} |\n"
    return text


def commands_page(title: str) -> str:
    """The commands of a page as Markdown."""
    root = _help_context(cli, PROGRAM, None)
    sections = "".join(
        section
        for entry in COMMANDS
        if _title_of(entry) == title
        for section in _command_sections(entry.load(), entry.name, root)
    )
    # The title of a group's page is its heading.
    return COMMANDS_PAGE_HEAD.format(title=title) + sections.removeprefix(f"\n## {title}\n")


def _title_of(entry: CommandEntry) -> str:
    """The title of the page that has a command."""
    if isinstance(entry.load(), click.Group):
        return f"{PROGRAM} {entry.name}"
    return entry.section


def _slug(title: str) -> str:
    return title.removeprefix(f"{PROGRAM} ").lower().replace(" ", "-")


def _help_context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(
        command, parent, name, terminal_width=HELP_WIDTH, **command.context_settings
    )


def _command_sections(
    command: click.Command, name: str, parent: click.Context | None
) -> Iterator[str]:
    context = _help_context(command, name, parent)
    text = command.get_help(context).rstrip()
    yield f"\n## {context.command_path}\n\n```text\n{text}\n```\n"
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from _command_sections(found, child, context)


def settings_page() -> str:
    """The settings as Markdown."""
    shown = [item for item in Settings.model_fields.items() if item[0] not in INTERNAL_FIELDS]
    return SETTINGS_HEAD + "".join(_setting_row(*item) + "\n" for item in shown) + SETTINGS_FOOT


def _setting_row(name: str, field: FieldInfo) -> str:
    variable = f"`{variable_of(name)}`"
    if name in secret_fields():
        variable += f", `{variable_of(name)}{FILE_SUFFIX}`"
    assert field.description is not None
    readers = ", ".join(readers_of(field))
    cells = variable, _default(field.default), _values(field), readers, field.description
    return f"| {' | '.join(cells)} |"


def _default(value: Any) -> str:
    if value is None or value == () or not str(value):
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _values(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(field.annotation))
    if field.annotation is bool:
        return "`true`, `false`"
    bounds = {type(bound): bound for bound in field.metadata}
    if Le not in bounds:
        return ""
    low = f"{bounds[Ge].ge:,}" if Ge in bounds else f"more than {bounds[Gt].gt:,}"
    return f"{low} to {bounds[Le].le:,}"


def metrics_page() -> str:
    """The catalogue of metrics as Markdown."""
    return METRICS_HEAD + "".join(_metric_row(metric) + "\n" for metric in CATALOGUE) + METRICS_FOOT


def _metric_row(metric: Metric) -> str:
    attributes = ", ".join(f"`{name}`" for name in metric.attributes)
    kind = metric.kind.value
    if metric.kind is MetricKind.HISTOGRAM:
        kind += " up to " + ", ".join(f"{bound:g}" for bound in metric.bounds)
    cells = (
        f"`{metric.name}`",
        f"`{metric.prometheus}`",
        kind,
        f"`{metric.unit}`",
        attributes,
        metric.description,
    )
    return f"| {' | '.join(cells)} |"


def errors_page() -> str:
    """Dead-letter reasons, exit codes, exceptions and problems as Markdown."""
    reasons = "".join(
        f"\n### {reason}\n\n{REASON_MEANINGS[reason]}.\n" for reason in get_args(DeadLetterReason)
    )
    problems = "".join(
        f"| `{kind.type}` | {kind.status} | {kind.title} |\n" for kind in ProblemKind
    )
    exceptions = "".join(_exception_rows(OutboxError))
    return ERRORS_HEAD + reasons + EXIT_CODES_TEXT + exceptions + PROBLEMS_HEAD + problems


def _exception_rows(kind: type[OutboxError]) -> Iterator[str]:
    for child in kind.__subclasses__():
        if child.__module__ == OutboxError.__module__:
            assert child.__doc__ is not None
            meaning = child.__doc__.strip().splitlines()[0]
            yield f"| `{child.__name__}` | `{kind.__name__}` | {child.exit_code} | {meaning} |\n"
            yield from _exception_rows(child)


PAGES: dict[str, Callable[[], str]] = {
    "command-line.md": commands_index,
    **{
        f"commands/{_slug(title)}.md": partial(commands_page, title)
        for title in dict.fromkeys(map(_title_of, COMMANDS))
    },
    "errors.md": errors_page,
    "metrics.md": metrics_page,
    "settings.md": settings_page,
    "sql.md": schema_page.page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (REFERENCE / name).parent.mkdir(exist_ok=True)
        (REFERENCE / name).write_text(page(), "utf-8")
