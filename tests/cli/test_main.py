"""Help texts; every failure is one line and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import click
import pytest

from outbox.cli.main import COMMANDS, cli
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from tests.support.commands import Command

ROOT = Path(__file__).parents[2]
GROUPS = {
    "endpoint": ["add", "list", "remove", "show"],
    "dead": ["count", "discard", "list", "replay"],
    "replay": ["abort", "list", "show"],
}


def run(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command as a process."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OUTBOX_", "PG"))}
    given = {"capture_output": True, "env": {**env, "PYTHONPATH": str(ROOT)}, **options}
    return subprocess.run([sys.executable, "-m", "outbox", *args], text=True, **given)  # type: ignore[call-overload,no-any-return]


def test_help_fits_on_a_screen_and_names_every_command(outbox: Command) -> None:
    result = outbox("--help")
    assert result.code == 0
    lines = result.out.splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80
    for entry in COMMANDS:
        assert f"  {entry.name} " in result.out
    assert "outbox demo" in result.out


@pytest.mark.system
def test_help_imports_no_command() -> None:
    code = (
        "import sys; from outbox.cli.main import run; run(['--help']); run(['pubish']);"
        "heavy = ['asyncpg', 'pydantic', 'rich', 'aiohttp', 'structlog', 'orjson'];"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.full
def test_every_command_can_be_the_first_that_is_imported() -> None:
    """In most tests the modules of other commands are imported already."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for module in [each for each in sys.modules if each.startswith('outbox')]:\n"
        "        del sys.modules[module]\n"
        "    importlib.import_module(name)\n"
    )
    packages = [(entry.leaf.package if entry.leaf else "outbox", entry) for entry in COMMANDS]
    names = [f"{package}.cli.{entry.name}" for package, entry in packages]
    subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, check=True)


def test_every_command_has_help_with_an_example(outbox: Command) -> None:
    def leaves(command: click.Command, path: list[str]) -> list[list[str]]:
        if not isinstance(command, click.Group):
            return [path]
        ctx = click.Context(command)
        found = []
        for name in command.list_commands(ctx):
            sub = command.get_command(ctx, name)
            assert sub is not None
            found += leaves(sub, [*path, name])
        return found

    for path in leaves(cli, []):
        result = outbox(*path, "--help")
        assert result.code == 0
        assert result.out.startswith(f"Usage: outbox {' '.join(path)} ")
        assert "Example" in result.out, path
        assert f"outbox {' '.join(path)}" in result.out.partition("Example")[2], path


def test_the_version_is_printed(outbox: Command) -> None:
    source = (ROOT / "outbox" / "version.py").read_text()
    version = source.partition('__version__ = "')[2].partition('"')[0]
    assert version
    assert outbox("--version").out == f"outbox {version}\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["pubish"], 'there is no command "pubish"; did you mean "publish"?'),
        (["xyz"], 'there is no command "xyz"; there are: demo, migrate, endpoint'),
        (["endpoint", "ad"], 'there is no command "ad"; did you mean "add"?'),
        (["dead", "replays"], 'there is no command "replays"; did you mean "replay"?'),
        (["publish"], "missing argument 'TYPE'; see: outbox publish --help"),
        (["publish", "a", "b"], "got unexpected extra argument (b); see: outbox publish --help"),
        (["publish", "a", "--pay-load", "1"], '"--pay-load"; did you mean "--payload"?'),
        (["--nix"], 'there is no option "--nix"'),
        (["endpoint", "add", "a"], "missing argument 'URL'"),
        (["endpoint", "list", "--limit", "0"], "--limit': 0 is not in the range 1<=x<=10000"),
        (["dead", "show", "x"], '"x" is not the ID of a dead letter'),
        (["dead", "show", str(2**63)], "is not the ID of a dead letter"),
        (["dead", "discard", "0"], '"0" is not the ID of a dead letter'),
        (["status", "--dsn", ""], "--dsn is empty"),
        (["migrate", "--check", "--producer", "app"], "it cannot be combined with --producer"),
        (
            ["migrate", "--check", "--payload-bytes-max", "5000"],
            "combined with --payload-bytes-max",
        ),
        (
            ["dead", "replay"],
            "select dead letters: by ids, all, or by endpoint, type",
        ),
        (["dead", "discard"], "select dead letters"),
        (["dead", "discard", "--until", "0d"], "select dead letters"),
        (["dead", "discard", "--tenant", ""], "tenant is empty"),
        (["dead", "replay", "--endpoint", ""], "endpoint is empty"),
        (
            ["publish", "a", "--expires-in", "5y"],
            '"5y" is not a time such as 0.5s, 30s, 10m, 2h or 1d',
        ),
        (["publish", "a", "--expires-in", "0"], '"0" is not a positive duration'),
        (["migrate", "--check", "--sql"], "--check and --sql exclude each other"),
        (["migrate", "--sql", "--json"], "it cannot be combined with --json"),
        (["migrate", "--from", "1"], "--from requires --sql"),
        (["status", "--schema", "pg_x"], '--schema: the schema cannot be "pg_x"'),
        (
            ["status", "--config", "/nowhere.toml"],
            "/nowhere.toml: the settings file does not exist",
        ),
    ],
)
def test_a_usage_error_is_one_line(outbox: Command, args: list[str], says: str) -> None:
    result = outbox(*args)
    assert result.code == 2
    assert says in result.error


def test_no_arguments_is_a_usage_error(outbox: Command) -> None:
    for args in ([], ["endpoint"], ["dead"]):
        result = outbox(*args)
        assert (result.code, result.out) == (2, "")
        assert "--help" in result.err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (CannotRun("two\nlines"), 3, "two lines"),
        (ValueError("odd"), 3, "unexpected ValueError: odd; OUTBOX_DEBUG=1 shows where"),
        (asyncpg.DivisionByZeroError("by 0\nDETAIL"), 3, "the database refused: by 0 (SQLSTATE"),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_failures_are_one_line_and_an_exit_code(
    outbox: Command,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    says: str | None,
) -> None:
    @click.command()
    def broken() -> None:
        raise error

    monkeypatch.setitem(sys.modules, "outbox.cli.status", types.SimpleNamespace(command=broken))
    result = outbox("status")
    assert result.code == code
    if says is None:
        assert (result.out, result.err) == ("", "")
        return
    assert says in result.error
    debugged = outbox("status", OUTBOX_DEBUG="1")
    assert debugged.code == code
    assert "Traceback" in debugged.err


@pytest.mark.slow
@pytest.mark.system
def test_a_process_exits_with_the_code() -> None:
    done = run("pubish")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'outbox: there is no command "pubish"; did you mean "publish"?\n'
    done = run("status", "--dsn", "postgresql://u:hunter2@127.0.0.1:1/d")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "outbox: no server listens at 127.0.0.1:1; start it, or correct the address (from --dsn)\n"
    )


@pytest.mark.system
def test_a_closed_pipe_is_not_an_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run("migrate", "--sql", capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.system
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_unwritable_output_is_reported() -> None:
    with Path("/dev/full").open("wb") as full:
        for args in (["migrate", "--sql"], ["--version"]):
            done = run(*args, capture_output=False, stdout=full, stderr=subprocess.PIPE)
            assert (done.returncode, done.stderr) == (
                1,
                "outbox: the command succeeded, but its output could not be written: "
                "No space left on device\n",
            )


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.system
def test_closed_standard_streams_are_handled() -> None:
    shell = [sys.executable, "-m", "outbox"]
    for args, closed, response in (
        (["migrate", "--sql"], ">&-", (0, "")),
        (["publish", "a", "--payload", "-"], "<&-", (2, "outbox: --payload -: stdin is closed\n")),
    ):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", *shell, *args],  # noqa: S607 (any shell will do)
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OUTBOX_DSN": "postgresql://u@127.0.0.1:1/d",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        assert (done.returncode, done.stderr) == response
