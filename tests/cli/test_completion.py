"""Completion in a shell: commands and options, without a database and without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from outbox.cli.main import COMMANDS, main
from outbox.leaves import DEVTOOLS
from tests.support.checkout import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.commands import Command

    Complete = Callable[[str], list[str]]

HEAVY = ["asyncpg", "pydantic", "rich", "aiohttp", "structlog", "orjson"]


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Complete:
    """What bash offers for the last word of a line."""

    def call(line: str) -> list[str]:
        monkeypatch.setenv("_OUTBOX_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        with pytest.raises(SystemExit):
            main()
        printed = capsys.readouterr()
        assert printed.err == ""
        words = [each.removeprefix("plain,") for each in printed.out.splitlines()]
        return [each for each in words if each]

    return call


def test_commands_options_and_choices_are_completed(complete: Complete) -> None:
    for line, offered in {
        "outbox en": ["endpoint"],
        "outbox --ver": ["--version"],
        "outbox endpoint re": ["refill", "remove", "resume"],
        "outbox publish --ke": ["--key"],
        "outbox completion ": ["bash", "zsh", "fish"],
        "outbox publish order.paid --payload ": [],
        "outbox nothing end": ["endpoint"],
    }.items():
        assert complete(line) == offered, line


def test_all_commands_are_offered(complete: Complete) -> None:
    assert complete("outbox ") == [each.name for each in COMMANDS]


def test_a_command_that_is_not_installed_completes_nothing(
    complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert {each.leaf for each in COMMANDS if each.name == "listen"} == {DEVTOOLS}
    assert complete("outbox listen --") == []


@pytest.mark.system
def test_the_names_of_commands_are_completed_without_their_imports() -> None:
    code = (
        "import sys; from outbox.cli.main import main\n"
        "try: main()\n"
        f"finally: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    line = {"_OUTBOX_COMPLETE": "bash_complete", "COMP_WORDS": "outbox e", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, **line},
    )  # fmt: skip
    assert (done.stdout.splitlines(), done.stderr) == (["plain,endpoint", "plain,erase"], "[]\n")


@pytest.mark.system
def test_the_script_of_a_shell_is_printed(outbox: Command) -> None:
    for shell in ("bash", "zsh", "fish"):
        result = outbox("completion", shell)
        assert result.code == 0
        assert f"_OUTBOX_COMPLETE={shell}_complete" in result.out


def test_another_shell_is_refused(outbox: Command) -> None:
    result = outbox("completion", "tcsh")
    assert (result.code, "'tcsh' is not one of 'bash', 'zsh', 'fish'" in result.error) == (2, True)
