"""The command line's root: which commands there are, and how they fail.

Commands are imported when they are called, so `outbox --help` and a mistyped
name answer at once.  Whatever goes wrong ends as one line on stderr and an
exit code:

    0    done
    1    it ran, and the answer is bad, or could not be written
    2    wrong usage
    3    it could not run
    130  interrupted
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from outbox import __version__
from outbox.errors import OutboxError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "outbox"
DEBUG_VARIABLE = "OUTBOX_DEBUG"
EXIT_UNANSWERED = 1
EXIT_UNEXPECTED = 3
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""What a shell reports for a program that SIGPIPE ended."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A command by name; its module `outbox.cli.<name>` has it as `command`."""

    name: str
    help: str
    section: str


_SET_UP, _WORK, _LOOK = "Set up", "Publish and deliver", "Look and repair"

COMMANDS = (
    Entry("demo", "See it all at work, on a database of its own.", _SET_UP),
    Entry("migrate", "Make the schema, or bring it up to date.", _SET_UP),
    Entry("endpoint", "Add, change, pause, test and remove destinations.", _SET_UP),
    Entry("apply", "Make endpoints what a file declares.", _SET_UP),
    Entry("rekey", "Encrypt the secrets in the database, or with another key.", _SET_UP),
    Entry("token", "Add, list and revoke tokens of the HTTP API.", _SET_UP),
    Entry("publish", "Publish one event.", _WORK),
    Entry("schedule", "Publish events by the clock, again and again.", _WORK),
    Entry("relay", "Run the relay: deliver what is published.", _WORK),
    Entry("listen", "Run a receiver for development.", _WORK),
    Entry("conform", "Grade a receiver, in whatever language it is written.", _WORK),
    Entry("status", "Show what is owed, failing and running.", _LOOK),
    Entry("trace", "Tell what happened to an event, and why it is not delivered.", _LOOK),
    Entry("doctor", "Look at preconditions and health, and say what to do.", _LOOK),
    Entry("alerts", "Print alerts for Prometheus, or a dashboard for Grafana.", _LOOK),
    Entry("dead", "List, count, show, replay and discard dead letters.", _LOOK),
    Entry("replay", "Send an endpoint its history again; follow and abort replays.", _LOOK),
    Entry("once", "List, show and reset once keys.", _LOOK),
    Entry("erase", "Erase what a tenant's or a key's events say.", _LOOK),
    Entry("prove", "Run relays under faults on your database, and judge them.", _LOOK),
    Entry("verify", "Prove from the tables that nothing is lost.", _LOOK),
)


class LazyGroup(click.Group):
    """A group whose commands are modules, imported one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [entry.name for entry in COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(f"outbox.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        suggest(self, ctx, args)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(entry.section for entry in COMMANDS):
            with formatter.section(section):
                formatter.write_dl([(e.name, e.help) for e in COMMANDS if e.section == section])


def suggest(group: click.Group, ctx: click.Context, args: list[str]) -> None:
    """Refuse a command that does not exist, with the nearest one.

    Raises:
        click.UsageError: there is no such command.
    """
    names = group.list_commands(ctx)
    if args[0] in names or args[0].startswith("-"):
        return
    near = difflib.get_close_matches(args[0], names, 1)
    hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(names)}"
    raise click.UsageError(f'there is no command "{args[0]}"; {hint}', ctx)


class Group(click.Group):
    """A group of commands that are there already."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        suggest(self, ctx, args)
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
First steps:
  outbox demo                                      nothing to set up
  export OUTBOX_DSN=postgresql://localhost/app
  outbox migrate
  outbox endpoint add billing https://example.com/hooks --type "order.*"
  outbox relay &
  outbox publish order.paid --key order-7 --payload '{"order": 7}'
""",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Deliver events out of PostgreSQL transactions: in order, numbered, signed.
    Applications insert events; the relay sends them to whoever wants them.
    Settings are flags, then OUTBOX_* variables, then outbox.toml.
    """


def main(args: Sequence[str] | None = None) -> None:
    """The console script."""
    if f"_{PROGRAM.upper()}_COMPLETE" in os.environ:
        cli.main(prog_name=PROGRAM)  # Shell completion answers and exits.
    sys.exit(run(sys.argv[1:] if args is None else list(args)))


def run(args: Sequence[str]) -> int:
    """Run one command; returns the exit code and raises nothing."""
    try:
        try:
            with cli.make_context(PROGRAM, list(args)) as ctx:
                cli.invoke(ctx)
        finally:
            _flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return UsageError.exit_code
    except click.ClickException as error:
        return _fail(_usage(error), UsageError.exit_code)
    except OutboxError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever reads us has enough.
        _drop_output()
        return EXIT_BROKEN_PIPE
    except Exception as error:  # The last resort: still one line.
        if isinstance(error, OSError) and _is_of_the_output(error):
            _drop_output()
            why = error.strerror or str(error)
            return _fail(
                f"it was done, but the answer could not be written: {why}", EXIT_UNANSWERED
            )
        return _fail(_unexpected(error), EXIT_UNEXPECTED)
    return 0


def _flush() -> None:
    # There is no stdout at all when it was closed before we were started.
    if sys.stdout is not None:
        sys.stdout.flush()


def _is_of_the_output(error: OSError) -> bool:
    """Whether it was the answer that could not be written: a full disk, say."""
    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_code is click.echo.__code__ for frame, _ in frames):
        return True
    # Or stdout still holds it, and fails again.
    try:
        _flush()
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Let go of what cannot be written; Python would complain once more at exit."""
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
        first_line = str(error).partition("\n")[0]
        return f"the database refused: {first_line} (SQLSTATE {error.sqlstate})"
    return f"unexpected {type(error).__name__}: {error}; {DEBUG_VARIABLE}=1 shows where"


def _fail(message: str, exit_code: int) -> int:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    from outbox.core.model.text import one_line

    # Whatever was quoted in it, it stays one line.
    with suppress(OSError):  # The exit code tells even where stderr is full.
        click.echo(f"{PROGRAM}: {one_line(message)}", err=True)
    return exit_code
