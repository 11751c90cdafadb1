"""The README is correct: its commands are executed, and print the shown output."""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
import yaml
from fastapi import FastAPI

import outbox as package
from outbox.cli.main import COMMANDS
from outbox.config import Settings, variable_of
from outbox.core.model import endpoint_config
from outbox.core.model.response import AttemptResult
from outbox.testing import FakeSender
from tests.support.api import make_token, serving
from tests.support.process import Ended, command_line, environment, outbox
from tests.support.relay import (
    OK,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    publish,
    running,
)
from tests.support.tcp import free_port
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database
    from tests.support.relay import Sent

ROOT = Path(__file__).parents[1]
README_LINES_MAX = 200
# The quickstart is in the README; the guide continues it.
README = "\n".join((ROOT / name).read_text() for name in ("README.md", "outbox/docs/guide.md"))
# Executed by a test of its own.
_BEGIN, _END = "### Order 17 never arrived", "### Operational events"
GUIDE = README[README.index(_BEGIN) : README.index(_END)]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


# Output that differs between runs.
VOLATILE = (
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<uuid>"),
    (r"[0-9a-f]{12}-\d+-\d+", "<lane>"),
    (r"whsec_\S+", "<secret>"),
    (r"obx_\S+", "<token>"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+]00:00", "<date>"),
    (r"\b\d\d:\d\d:\d\d\b", "<time>"),
    (r"127\.0\.0\.1:\d+", "<address>"),
    (r"\S+:\d+$", "<process>"),
    (r"[+]?\b(\d+\.\d s|\d+(\.\d)? ms)\b", "<moment>"),
    (r" +", " "),
)


def _same(text: str) -> list[str]:
    lines = []
    for line in text.strip().splitlines():
        for pattern, name in VOLATILE:
            line = re.sub(pattern, name, line)
        lines.append(line.strip())
    return lines


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return fenced blocks with their language."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


BLOCKS = _blocks(README.replace(GUIDE, ""))


def _console(blocks: list[tuple[str, str]] = BLOCKS) -> list[tuple[str, str]]:
    """Return every `$ command` with the output below it."""
    found = []
    for language, block in blocks:
        if language == "console":
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                found.append((command, output))
    return found


class Walkthrough:
    """The reader's session through "Use it", on a test database."""

    def __init__(self, database: Database, log: Path) -> None:
        self.port = free_port()
        self.env = {"OUTBOX_DSN": database.dsn, "COLUMNS": "120"}
        self.secret = ""
        self.log = log
        self.running: list[tuple[asyncio.subprocess.Process, Path, str]] = []

    async def run_line(self, line: str, output: str) -> None:
        """Run one command line and compare its output with the README."""
        env = dict(self.env)
        words = shlex.split(line.replace("9000", str(self.port)))
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            env[name] = self.secret if name == "OUTBOX_SECRET" else value
        assert words[0] == "outbox", line
        if words[1] in ("listen", "relay"):
            await self._start(words[1:], env, output)
            return
        ended = await outbox(*words[1:], env=env)
        assert ended.code == 0, ended.stderr
        # A terminal shows both streams.
        printed = ended.stdout + ended.stderr
        if "…" in output.splitlines():
            assert set(_same(output)) - {"…"} <= set(_same(printed)), printed
        else:
            assert _same(printed) == _same(output), printed
        self._remember(ended)

    def _remember(self, ended: Ended) -> None:
        if secret := re.search(r"whsec_\S+", ended.stdout):
            self.secret = secret[0]

    async def _start(self, words: list[str], env: dict[str, str], output: str) -> None:
        path = self.log / f"{words[0]}.log"
        with path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command_line(*words), env=environment(env), stdout=log, stderr=log
            )
        self.running.append((process, path, output))
        ready = "listening" if words[0] == "listen" else "replica registered"
        await until(lambda: ready in path.read_text(), 20, ready)

    async def end(self) -> None:
        """Stop the running processes, and compare their output with the README."""
        for process, _, _ in self.running:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()
        for _, path, output in self.running:
            printed = _same(path.read_text())
            assert all(line in printed for line in _same(output)), printed


@pytest.mark.one_major
async def test_the_walkthrough_prints_the_output_of_the_readme(
    empty_database: Database, tmp_path: Path
) -> None:
    walk = Walkthrough(empty_database, tmp_path)
    sql = next(block for language, block in BLOCKS if language == "sql")
    try:
        for line, output in _console():
            if line.startswith(("python3", "export OUTBOX_DSN")):
                continue
            if setting := re.fullmatch(r"export (\w+)=(\S+)", line):
                walk.env[setting[1]] = setting[2]
                continue
            if line == "outbox status":
                async with empty_database.connection() as connection:
                    await connection.execute(sql)
                await all_ended(empty_database)
            await walk.run_line(line, output)
    finally:
        await walk.end()


@pytest.mark.one_major
async def test_the_guide_leads_from_the_symptom_to_the_repair(
    database: Database, tmp_path: Path
) -> None:
    repaired = False

    def receive(sent: Sent) -> AttemptResult:
        if sent.url.endswith("billing") and sent.body["data"]["order"] >= 17 and not repaired:
            return AttemptResult.completed(400, 0.004, body=b"order number too long")
        return OK

    await add_endpoint(database, "billing", types=["order.*"])
    await add_endpoint(database, "audit")
    walk = Walkthrough(database, tmp_path)
    async with running(database, Network(receive)):
        for n in range(15, 21):
            await publish(database, {"order": n}, type="order.paid", key=f"order-{n}")
        await all_ended(database)
        for line, output in _console(_blocks(GUIDE)):
            # "When the receiver is mended …"
            repaired = repaired or ("replay" in line and "--dry-run" not in line)
            await walk.run_line(line, output)
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_the_python_examples_run(database: Database) -> None:
    first, second, _ = (block for language, block in BLOCKS if language == "python")
    async with database.connection() as connection:
        await connection.execute("CREATE TABLE public.orders AS SELECT 7 AS id, false AS paid")
        await _python(first, connection)
        assert await connection.fetchval("SELECT paid FROM public.orders")
        assert await connection.fetchval("SELECT key FROM relay.outbox") == "order-7"
        in_two_weeks = datetime.now(UTC) + timedelta(days=14)
        await _python(second, connection, invoice=lambda n: {"n": n}, in_two_weeks=in_two_weeks)
        keep_s = (
            "SELECT extract(epoch FROM expires_at - claimed_at)::int FROM relay.idempotency_key"
        )
        assert await connection.fetchval(keep_s) == 90 * 86400
        due = await connection.fetchval("SELECT deliver_at FROM relay.future_event")
        assert due == in_two_weeks


@pytest.mark.one_major
async def test_the_receiver_example_receives(database: Database) -> None:
    *_, block = (block for language, block in BLOCKS if language == "python")
    sender, app = FakeSender(), FastAPI()
    async with database.connection() as connection:
        await connection.execute("CREATE TABLE public.orders AS SELECT 7 AS id, false AS shipped")
    async with asyncpg.create_pool(database.dsn, min_size=1, max_size=2) as pool:
        exec(block, {"secret": sender.secret, "pool": pool, "app": app})  # noqa: S102 (our own README)
        receiver = app.user_middleware[0].kwargs["receiver"]
        response = await receiver.handle(sender.event("order.paid", {"order": 7}))
        assert response.status == 200
        assert await pool.fetchval("SELECT shipped FROM public.orders")


async def _python(snippet: str, connection: Connection[Any], **given: object) -> None:
    body = "".join(f"    {line}\n" for line in snippet.splitlines())
    names: dict[str, Any] = {"outbox": package, "timedelta": timedelta, **given}
    exec(f"async def main(connection):\n{body}", names)  # noqa: S102 (our own README)
    await names["main"](connection)


@pytest.mark.one_major
async def test_the_api_example_publishes_once(database: Database) -> None:
    (block,) = [block for _, block in BLOCKS if block.startswith("curl ")]
    token = await make_token(database, scopes=("publish",))
    words = shlex.split(block.replace("$TOKEN", token).replace("\\\n", " "))
    assert words[0] == "curl"
    path = words[1].removeprefix("http://127.0.0.1:8080")
    values = list(zip(words[2::2], words[3::2], strict=True))
    headers = dict(value.split(": ", 1) for flag, value in values if flag == "-H")
    (body,) = [value for flag, value in values if flag == "-d"]
    async with serving(database) as api:
        first = await api.request("POST", path, headers=headers, data=body.encode())
        again = await api.request("POST", path, headers=headers, data=body.encode())
    assert (first.status, again.status) == (201, 200)
    assert first.json["id"] == again.json["id"]


def test_the_endpoint_file_example_is_valid() -> None:
    (text,) = [block for language, block in BLOCKS if language == "yaml"]
    shop, audit = endpoint_config.parse_file(yaml.safe_load(text))
    assert (shop.settings.lanes, audit.settings.on_dead_letter) == (4, "block")


async def test_the_demo_prints_the_output_of_the_readme() -> None:
    (output,) = [output for line, output in _console() if line == "python3 run.py demo"]
    ended = await outbox("demo", "--events", "120", "--seed", "17")
    assert ended.code == 0, ended.stderr

    def without_numbers(text: str) -> list[str]:
        kept = [re.sub(r"[\d,.]+", "#", line) for line in text.strip().splitlines()]
        return [re.sub(r" +", " ", line).strip() for line in kept]

    zeros = [line for line in output.splitlines() if "✓" in line]
    assert len(zeros) == 4
    assert all(line in ended.stdout.splitlines() for line in zeros)
    printed = without_numbers(ended.stdout)
    assert [line for line in without_numbers(output) if line not in printed] == []


def test_every_setting_of_the_relay_is_in_the_table() -> None:
    documented = set(re.findall(r"`(OUTBOX_[A-Z_]+)`", README))
    internal = {"dsn_source", "secret"}
    wanted = {variable_of(name) for name in Settings.model_fields if name not in internal}
    assert wanted <= documented


def test_every_command_is_documented() -> None:
    assert [c.name for c in COMMANDS if not re.search(rf"outbox {c.name}\b", README)] == []
