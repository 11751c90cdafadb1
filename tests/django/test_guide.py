"""The guide is followed, with its files as they stand, from an empty directory to the deliveries
that the receiver prints."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from outbox_devtools.embedded.binaries import find_binaries
from tests.django.projects import ROOT, database_settings
from tests.django.test_migrations import in_project
from tests.support.documents import normalized, read
from tests.support.ports import free_port
from tests.support.waiting import until_sync

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.postgres import Database, Server

pytestmark = pytest.mark.one_major

GUIDE = "docs/howto/publish-from-django.md"

BACKGROUND = {
    "outbox listen": "listening",
    "outbox relay": "replica registered",
    "runserver": "Quit the server",
}
"""Commands that run until the end, and what they print when they are ready."""

SKIPPED = ("python3 -m venv", ". .venv", "pip install", "createdb")
"""The environment and the database are there."""

STEP = re.compile(
    r"(?P<verb>Save|Add)\s+this\s+(?:as|to the end of) `(?P<file>[\w/.]+)`:\n\n"
    r"```python\n(?P<text>.*?)^```|^```console\n(?P<commands>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
WAIT_S = 30.0


class Reader:
    """Follows the guide in a directory."""

    def __init__(self, database: Database, directory: Path, role: str) -> None:
        self.directory = directory
        self.database = database
        self.role = role
        self.rewrites = {
            r"\b9000\b": str(free_port()),
            r"\b8000\b": str(free_port()),
            r"\bshop_app\b": role,
        }
        self.running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
        programs = directory / "bin"
        programs.mkdir()
        for name, words in {
            "outbox": "-m outbox",
            "python": "",
            "pytest": "-m pytest -p no:cacheprovider -p no:schemathesis",
            "django-admin": "-m django",
        }.items():
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            (programs / name).chmod(0o755)
        server = find_binaries(database.major).bin_dir
        given = database_settings(database.dsn)
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("OUTBOX_", "PYTEST_"))},
            "PATH": f"{programs}:{server}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "PGUSER": given["USER"],
            "PGHOST": given["HOST"],
            "PGPORT": given["PORT"],
            "COLUMNS": "200",
        }

    def follow(self, text: str) -> None:
        for step in STEP.finditer(text):
            if step["file"]:
                self.write(step)
                continue
            for part in re.split(r"^\$ ", step["commands"], flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                self.run(command, output)

    def write(self, step: re.Match[str]) -> None:
        path = self.directory / step["file"]
        before = path.read_text() if step["verb"] == "Add" else ""
        text = step["text"]
        if path.name == "settings.py":
            text = text.replace('"NAME": "shop"', f'"NAME": "{self.database.name}"')
        path.write_text(before + text)

    def run(self, command: str, output: str) -> None:
        """Run one command, and compare what it prints if the guide shows it."""
        if command.startswith(SKIPPED):
            return
        for pattern, replacement in self.rewrites.items():
            command = re.sub(pattern, replacement, command)
        if command.startswith("export "):
            self.env |= dict(word.split("=", 1) for word in shlex.split(command)[1:])
            return
        for name, ready in BACKGROUND.items():
            if f"{name} " in f"{command} ":
                self.start(name, command, ready)
                return
        ended = subprocess.run(
            ["/bin/sh", "-euc", command],
            cwd=self.directory, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert ended.returncode == ("Traceback" in output), (command, ended.stdout)
        if output.strip():
            printed, shown = normalized(ended.stdout), normalized(output)
            if "…" in shown:
                assert set(shown) - {"…"} <= set(printed), ended.stdout
            else:
                assert printed == shown
        for secret in re.findall(r"whsec_\S+", output):
            self.rewrites[re.escape(secret)] = re.findall(r"whsec_\S+", ended.stdout)[0]

    def start(self, name: str, command: str, ready: str) -> None:
        path = self.directory / f"{name.replace(' ', '-')}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                ["/bin/sh", "-euc", command], cwd=self.directory, env=self.env,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.running[name] = process, path
        self.wait_for(lambda: ready in path.read_text(), name)

    def wait_for(self, condition: Any, name: str) -> None:
        process, path = self.running[name]

        def is_met() -> bool:
            if condition():
                return True
            assert process.poll() is None, path.read_text()
            return False

        try:
            until_sync(is_met, WAIT_S, name)
        except AssertionError as error:
            error.add_note(path.read_text())
            raise

    def received(self) -> list[str]:
        lines = normalized(self.running["outbox listen"][1].read_text())
        return [line for line in lines if line.startswith("<time>")]

    def end(self) -> None:
        for process, _ in reversed(self.running.values()):
            os.killpg(process.pid, signal.SIGTERM)
        for process, _ in self.running.values():
            process.wait(WAIT_S)


@pytest.fixture
def reader(empty_database: Database, tmp_path: Path) -> Iterator[Reader]:
    """A reader with an empty directory and an empty database."""
    reader = Reader(empty_database, tmp_path, f"shop_app_{empty_database.name}")
    try:
        yield reader
    finally:
        reader.end()
        with psycopg.connect(empty_database.dsn, autocommit=True) as owner:
            exists = "SELECT FROM pg_roles WHERE rolname = %s"
            if owner.execute(exists, [reader.role]).rowcount:
                owner.execute(f"DROP OWNED BY {reader.role}")
                owner.execute(f"DROP ROLE {reader.role}")


@pytest.mark.full
def test_the_guide_leads_to_the_deliveries_that_it_shows(reader: Reader) -> None:
    text = read(GUIDE)
    shown = [
        line
        for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL)
        for line in normalized(block)
    ]
    assert shown
    reader.follow(text)
    reader.wait_for(lambda: len(reader.received()) >= len(shown), "outbox listen")
    assert reader.received() == shown


async def test_the_example_with_several_databases_runs(database: Database, server: Server) -> None:
    settings, example = re.findall(
        r"```python\n(.*?)```", read(GUIDE).partition("## Several databases")[2], re.DOTALL
    )
    values: dict[str, Any] = {}
    exec(settings, values)  # noqa: S102

    class Order:
        pk = 7

        def save(self, using: str) -> None:
            assert using == "shard2"

    def run() -> list[tuple[Any, ...]]:
        from django.db import connections, transaction

        from outbox.django import publish

        exec(example, {"transaction": transaction, "publish": publish, "order": Order()})  # noqa: S102
        with connections["shard2"].cursor() as cursor:
            cursor.execute("SELECT type FROM relay.outbox")
            return list(cursor.fetchall())

    async with server.database() as shard:
        published = await in_project(
            {"default": database, "shard2": shard},
            run,
            OUTBOX_DATABASES=values["OUTBOX_DATABASES"],
        )
    assert published == [("order.paid",)]
