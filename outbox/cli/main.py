"""The root of the command line: the list of commands, error messages and exit codes.

A command's module is imported when the command is called, so `outbox --help` and
a mistyped name need no imports.  Every error is one line on stderr, after which another names the
page that explains it if there is one, and an exit code:

    0    done
    1    the command ran, and found a problem or could not write its output
    2    wrong usage
    3    the command could not run
    130  interrupted
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import NoArgsIsHelpError

from outbox import __version__
from outbox.cli.group import suggest
from outbox.errors import OutboxError, UsageError
from outbox.extras import RELAY, missing_extra
from outbox.leaves import ADOPT, API, DEVTOOLS, DOCTOR, Leaf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

PROGRAM = "outbox"
COMPLETE_VARIABLE = "_OUTBOX_COMPLETE"
"""The variable with which the script of `outbox completion` requests completions."""
DEBUG_VARIABLE = "OUTBOX_DEBUG"
EXIT_OUTPUT_FAILED = 1
EXIT_UNEXPECTED = 3
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""The shell's exit status for a program that SIGPIPE ended (128 + 13)."""


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command in the list; a module of a package `cli` defines it as `command`."""

    name: str
    help: str
    section: str
    leaf: Leaf | None = None
    """Where its package `cli` is; None: here."""
    module: str | None = None
    """The module; None: it has the command's name."""

    def load(self) -> click.Command:
        """Import the command.

        Raises:
            CannotRun: it is in a leaf that is not installed.
        """
        name = f"cli.{self.module or self.name}"
        if self.leaf is None:
            module = importlib.import_module(f"outbox.{name}")
        else:
            module = self.leaf.load(name)
        command = module.command
        assert isinstance(command, click.Command)
        return command


_SET_UP, _WORK, _INSPECT = "Set up", "Publish and deliver", "Inspect"

COMMANDS = (
    CommandEntry("demo", "Run a complete example on a temporary database.", _SET_UP, DEVTOOLS),
    CommandEntry("migrate", "Create the schema, or upgrade it.", _SET_UP),
    CommandEntry("endpoint", "Add, change, pause, test and remove destinations.", _SET_UP),
    CommandEntry("apply", "Apply endpoints from a declaration file.", _SET_UP),
    CommandEntry("adopt", "Move in from another outbox table, step by step.", _SET_UP, ADOPT),
    CommandEntry(
        "rekey", "Encrypt secrets in the database, or rotate the encryption key.", _SET_UP, DOCTOR
    ),
    CommandEntry("token", "Add, list and revoke tokens of the HTTP API.", _SET_UP),
    CommandEntry("quota", "Limit what each tenant may have.", _SET_UP),
    CommandEntry("completion", "Complete commands and options in a shell.", _SET_UP),
    CommandEntry("publish", "Publish one event.", _WORK),
    CommandEntry("schedule", "Publish events on a cron schedule.", _WORK),
    CommandEntry("snapshot", "Take a position in the events, and run a command on it.", _WORK),
    CommandEntry("relay", "Run the relay, which delivers published events.", _WORK),
    CommandEntry("api", "Serve the HTTP API, its page and the receivers.", _WORK, API),
    CommandEntry("listen", "Run a receiver for development.", _WORK, DEVTOOLS),
    CommandEntry(
        "conform", "Test a receiver in any language against the protocol.", _WORK, DEVTOOLS
    ),
    CommandEntry("status", "Show relays, pending deliveries and failing endpoints.", _INSPECT),
    CommandEntry("deliveries", "List what an endpoint got, and what failed.", _INSPECT),
    CommandEntry("trace", "Trace an event, and explain why it is not delivered.", _INSPECT, DOCTOR),
    CommandEntry(
        "doctor", "Check the configuration and health, and suggest fixes.", _INSPECT, DOCTOR
    ),
    CommandEntry(
        "alerts", "Print Prometheus alert rules or a Grafana dashboard.", _INSPECT, DOCTOR
    ),
    CommandEntry("dead", "List, count, show, replay and discard dead letters.", _INSPECT),
    CommandEntry("replay", "Replay past events to an endpoint; list and abort replays.", _INSPECT),
    CommandEntry(
        "journal", "List changes, with the user, token or relay of each.", _INSPECT, DOCTOR
    ),
    CommandEntry("once", "List, show and reset idempotency keys.", _INSPECT, DOCTOR),
    CommandEntry("erase", "Erase the payloads of a tenant's or a key's events.", _INSPECT),
    CommandEntry(
        "prove", "Run relays under injected faults, and check the result.", _INSPECT, DEVTOOLS
    ),
    CommandEntry(
        "verify", "Check the tables for lost, duplicate or misordered events.", _INSPECT, DOCTOR
    ),
    CommandEntry("resequence", "Sequence committed events that were skipped.", _INSPECT, DOCTOR),
)


class LazyGroup(click.Group):
    """A command group that imports a command's module when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [entry.name for entry in COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return next((entry.load() for entry in COMMANDS if entry.name == cmd_name), None)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(entry.name, help=entry.help)
            for entry in COMMANDS
            if entry.name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        suggest(self, ctx, args)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(entry.section for entry in COMMANDS):
            with formatter.section(section):
                formatter.write_dl([(e.name, e.help) for e in COMMANDS if e.section == section])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
First steps:
  outbox demo                                      needs no set-up
  export OUTBOX_DSN=postgresql://localhost/app && outbox migrate
  outbox listen --endpoint dev --type "order.*"    in a second terminal
  outbox relay &
  outbox publish order.paid --key order-7 --payload '{"order": 7}'
""",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """\b
    Deliver events from PostgreSQL transactions as ordered, signed webhooks.
    Settings: flags, then OUTBOX_* variables, then outbox.toml.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    if COMPLETE_VARIABLE in os.environ:
        with suppress(OutboxError):  # The command is in a package that is not installed.
            cli.main(prog_name=PROGRAM)  # Prints the completions and exits.
        sys.exit(UsageError.exit_code)
    sys.exit(run(sys.argv[1:] if args is None else list(args)))


def run(args: Sequence[str]) -> int:
    """Run one command and return its exit code; no exception escapes."""
    try:
        try:
            with cli.make_context(PROGRAM, list(args)) as ctx:
                cli.invoke(ctx)
        finally:
            _flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)  # noqa: TID251 (our own help)
        return UsageError.exit_code
    except click.ClickException as error:
        return _fail(_usage(error), UsageError.exit_code)
    except OutboxError as error:
        return _fail(str(error), error.exit_code, error)
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has closed it, as `| head` does.
        _drop_output()
        return EXIT_BROKEN_PIPE
    except Exception as error:  # Unexpected errors, too, are reported in one line.
        if isinstance(error, OSError) and _is_output_error(error):
            _drop_output()
            reason = error.strerror or str(error)
            return _fail(
                f"the command succeeded, but its output could not be written: {reason}",
                EXIT_OUTPUT_FAILED,
            )
        return _fail(_unexpected(error), EXIT_UNEXPECTED, error)
    return 0


def _flush() -> None:
    # stdout is None if it was closed before this process started.
    if sys.stdout is not None:
        sys.stdout.flush()


def _is_output_error(error: OSError) -> bool:
    """Whether writing the output failed, for example on a full disk."""
    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_code is click.echo.__code__ for frame, _ in frames):  # noqa: TID251
        return True
    # The failed data is still in the buffer of stdout, so that flushing it fails again.
    try:
        _flush()
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Discard output that cannot be written; Python would report the error again at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption):
        message = f'there is no option "{error.option_name}"'
        if error.possibilities:
            message += f'; did you mean "{error.possibilities[0]}"?'
    if message.endswith("?"):
        return message
    ctx = getattr(error, "ctx", None)
    see = ctx.command_path if ctx is not None else PROGRAM
    return f"{message[:1].lower()}{message[1:]}; see: {see} --help"


def _unexpected(error: Exception) -> str:
    asyncpg: Any = sys.modules.get("asyncpg")
    if asyncpg is not None and isinstance(error, asyncpg.PostgresError):
        if isinstance(error, asyncpg.ReadOnlySQLTransactionError):
            from outbox.store.connection.connect import READ_ONLY

            return READ_ONLY
        if isinstance(error, asyncpg.LockNotAvailableError):
            return "another session has locked a table of the outbox; outbox doctor names it"
        first_line = str(error).partition("\n")[0]
        return f"the database refused: {first_line} (SQLSTATE {error.sqlstate})"
    # click may be there without the relay's other packages.
    if isinstance(error, ImportError) and (missing := missing_extra(error, RELAY, "this command")):
        return str(missing)
    return f"unexpected {type(error).__name__}: {error}; {DEBUG_VARIABLE}=1 shows where"


def _fail(message: str, exit_code: int, error: Exception | None = None) -> int:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    from outbox.cli.error_pages import find_page
    from outbox.core.model.text import one_line

    # Quoted user input may contain line breaks; the message stays one line.
    with suppress(OSError):  # stderr may be full as well; the exit code still reports the error.
        click.echo(f"{PROGRAM}: {one_line(message)}", err=True)  # noqa: TID251 (one line)
        if (page := find_page(error)) is not None:
            click.echo(f"{PROGRAM}: see {page}", err=True)  # noqa: TID251 (our own)
    return exit_code
