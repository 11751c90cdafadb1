"""Documents whose examples are executed: their blocks, and a session that runs them."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import shlex
import signal
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import orjson
import yaml

from outbox.config import load
from outbox.core.model import endpoint_config
from outbox.store.connection import dsn
from tests.support import forking
from tests.support.ports import free_port
from tests.support.process import environment, outbox
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable

    from tests.support.postgres import Database

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
)

EXECUTED = {"console", "go", "java", "javascript", "json", "python", "sh", "sql", "yaml"}
"""Languages whose blocks are executed or parsed; blocks of `text` are not.

A block below "Save this as `shop.py`:" is written to that file, and the document's commands run
it.
"""

GUIDES = {
    name: f"docs/howto/publish-from-{name}.md" for name in ("fastapi", "flask", "psycopg", "sql")
} | {
    "first event": "docs/tutorial/first-event.md",
    "relay in an application": "docs/howto/run-the-relay-in-an-application.md",
    "search index": "docs/howto/boot-a-search-index.md",
}
"""Documents that start in an empty directory; tests/test_guides.py follows them."""

BACKGROUND = {
    "outbox listen": "listening",
    "outbox relay": "replica registered",
    "outbox api": "the API listens",
    "uvicorn": "Uvicorn running",
    "python worker.py": "replica registered",
    "python receiver.py": "Running on",
    "python sell.py": "selling",
    "flask": "Running on",
}
"""Commands that run until the end of the session, and what they print when they are ready."""

EXIT_CODES = {"doctor": (0, 1)}
"""Commands that end with another code than 0 if they find something."""

_FAILURE = re.compile(r"^(Traceback|.*ERROR: |\d+ records? not imported)", re.MULTILINE)
"""What a command prints that a document shows failing."""

_BLOCK = re.compile(
    r"(?:Save\s+this\s+as\s+`(?P<file>\w+\.\w+)`:\n\n)?"
    r"^(?P<indent> *)(?:<!-- not run: (?P<reason>.+?) -->\n\s*)?"
    r"```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)

IDENTIFIERS = (
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<uuid>"),
    (r"[0-9a-f]{12}-\d+-\d+", "<lane>"),
    (r"whsec_[^\s…]+", "<secret>"),
    (r"obx_[^\s…]+", "<token>"),
)
"""Generated values: a later command of a document may repeat one."""

VOLATILE = (
    *IDENTIFIERS,
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+]00:00", "<date>"),
    (r"\b\d\d:\d\d:\d\d\b", "<time>"),
    (r"127\.0\.0\.1:\d+", "<address>"),
    (r"\S+:\d+$", "<process>"),
    (r"[+]?\b\d+(\.\d)? ?(ms|[smhd])( \d+[smh])?(?!\S)", "<moment>"),
    (r"\b\d+ days left", "<n> days left"),
    (r"\bafter \d+ attempts", "after <n> attempts"),
    (r"\breplay job \d+", "replay job <id>"),
    (r" +", " "),
)
"""Output that differs between runs."""

_IDENTIFIER = re.compile("|".join(f"({pattern})" for pattern, _ in IDENTIFIERS))


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    text: str
    not_run: str | None
    """Why it is not executed."""
    file: str | None
    """The file that the reader saves it in."""


_SHELL = {">", "--output"}
"""Words of an `outbox` command that is left to a shell: it redirects, or expands a variable."""


def sections(text: str) -> list[tuple[str, str]]:
    """Split a document at its headings: each one, with what is below it."""
    parts = re.split(r"^#+ (.*)\n", text, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a document."""
    return [
        Block(each["language"], textwrap.dedent(each["text"]), each["reason"], each["file"])
        for each in _BLOCK.finditer(text)
    ]


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def examples(document: str, without: Collection[str] = ()) -> list[Block]:
    """The blocks of a document that a test executes.

    Args:
        without: headings of sections that the reader omits.
    """
    text = read(document)
    if without:
        text = "".join(below for heading, below in sections(text) if heading not in without)
    return [each for each in blocks(text) if each.language in EXECUTED and not each.not_run]


def normalized(text: str) -> list[str]:
    """Lines without what differs between runs."""
    lines = []
    for line in text.strip().splitlines():
        for pattern, name in VOLATILE:
            line = re.sub(pattern, name, line)
        lines.append(line.strip())
    return lines


def console(block: Block) -> list[tuple[str, str]]:
    """Return every `$ command` with the output below it."""
    found = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        found.append((command, output))
    return found


class Session:
    """A reader that follows a document, on a test database.

    Attributes:
        names: the variables of the Python blocks.
        rewrites: regular expressions and what commands and code contain instead.
        commands: programs of shell blocks that the test replaces, by name; what one returns is its
            output.
        before_end: waits for the effects of the document, before its processes are stopped.
    """

    def __init__(self, database: Database, directory: Path) -> None:
        self.database = database
        self.directory = directory
        self.env = {"OUTBOX_DSN": database.dsn, "COLUMNS": "120", "PYTHONPATH": str(ROOT)}
        self.names: dict[str, Any] = {}
        self.port = free_port()
        self.rewrites = {r"\b9000\b": str(self.port)}
        self.commands: dict[str, Callable[[list[str]], Awaitable[str | None]]] = {}
        self.before_line: Callable[[str], Awaitable[None]] | None = None
        self.before_end: Callable[[], Awaitable[None]] | None = None
        self._identifiers: dict[str, str] = {}
        self._running: list[tuple[asyncio.subprocess.Process | forking.Process, Path, str]] = []

    async def follow(self, examples: Iterable[Block]) -> None:
        """Execute the blocks of a document, and end the processes that they started."""
        try:
            for block in examples:
                await self.run(block)
            if self.before_end is not None:
                await self.before_end()
        finally:
            await self.end()

    async def run(self, block: Block) -> None:
        """Execute one block.

        Raises:
            AssertionError: a command fails, or prints something else than the document shows.
        """
        text = self._rewritten(block.text)
        if block.file is not None:
            (self.directory / block.file).write_text(text)
            return
        match block.language:
            case "console":
                for line, output in console(block):
                    await self.run_line(line, output)
            case "sh":
                for line in block.text.replace("\\\n", " ").splitlines():
                    await self.run_line(line.partition("  #")[0].rstrip(), "")
            case "python":
                await self._run_python(text)
            case "sql":
                async with self.database.connection() as connection:
                    await connection.execute(text)
            case "yaml":
                endpoint_config.parse_file(yaml.safe_load(text))
            case "json":
                orjson.loads(text)

    async def run_line(self, line: str, output: str) -> None:
        """Run one command line, and compare its output with the document if it shows any."""
        if self.before_line is not None:
            await self.before_line(line)
        line = self._rewritten(line).removesuffix(" &")
        words = shlex.split(line.replace("$PWD", str(self.directory)))
        if words[0] == "export":
            self.env |= dict(word.split("=", 1) for word in words[1:])
            settings = load(env=self.env)
            dsn.parse(settings.dsn.get_secret_value(), source="the document", env={})
            return
        env = dict(self.env)
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            env[name] = value
        if words[0] in self.commands:
            printed = await self.commands[words[0]](words[1:])
            if printed is not None and output.strip():
                self._compare(output, printed)
            return
        if any(each in BACKGROUND for each in (words[0], " ".join(words[:2]))):
            await self._start(words, env, output)
            return
        if words[0] != "outbox" or _SHELL.intersection(words):
            await self._run_shell(line, output)
            return
        ended = await outbox(*words[1:], env=env, directory=self.directory)
        shown = (1,) if _FAILURE.search(output) else (0,)
        assert ended.code in EXIT_CODES.get(words[1], shown), ended.stderr
        if output.strip():
            # A terminal shows both streams.
            self._compare(output, ended.stdout + ended.stderr)

    def _compare(self, output: str, printed: str) -> None:
        expected, actual = normalized(output), normalized(printed)
        if "…" in expected:
            assert set(expected) - {"…"} <= set(actual), printed
        else:
            assert actual == expected, printed
        originals = dict(zip(actual, printed.strip().splitlines(), strict=True))
        for line, name in zip(output.strip().splitlines(), expected, strict=True):
            values = (each[0] for each in _IDENTIFIER.finditer(originals.get(name, "")))
            shown = (each[0] for each in _IDENTIFIER.finditer(line))
            self._identifiers.update(zip(shown, values, strict=False))

    def _rewritten(self, text: str) -> str:
        for pattern, replacement in self.rewrites.items():
            text = re.sub(pattern, replacement, text)
        return _IDENTIFIER.sub(lambda each: self._identifiers.get(each[0], each[0]), text)

    async def _start(self, words: list[str], env: dict[str, str], output: str) -> None:
        program = words[0] if words[0] in BACKGROUND else " ".join(words[:2])
        path = self.directory / f"{program.replace(' ', '-')}-{len(self._running)}.log"
        process: asyncio.subprocess.Process | forking.Process
        with path.open("wb") as log:
            if words[0] == "outbox":
                process = await forking.start(
                    words[1:], environment(env), [log, log], self.directory
                )
            else:
                process = await self._interpret(words, env, log)
        self._running.append((process, path, output))
        ready = BACKGROUND[program]

        def is_ready() -> bool:
            assert process.returncode is None, f"{program} has ended: {path.read_text()}"
            return ready in path.read_text()

        try:
            await until(is_ready, what=ready)
        except AssertionError as error:
            error.add_note(f"{program} has printed: {path.read_text()}")
            raise

    async def _interpret(
        self, words: list[str], env: dict[str, str], log: IO[bytes]
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, *(words[1:] if words[0] == "python" else ("-m", *words))),
            cwd=self.directory,
            # Python shows each line at once on a terminal only.
            env=environment(env) | {"PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=log,
        )

    async def interrupt(self, program: str) -> None:
        """Press Ctrl-C in the terminal of a command of BACKGROUND."""
        name = program.replace(" ", "-")
        for process, path, _ in self._running:
            if path.name.startswith(name) and process.returncode is None:
                process.send_signal(signal.SIGINT)
                await process.wait()

    def printed(self, program: str) -> str:
        """The output of a command of BACKGROUND until now."""
        name = program.replace(" ", "-")
        (found,) = [path for _, path, _ in self._running if path.name.startswith(name)]
        return found.read_text()

    async def _run_shell(self, text: str, output: str = "") -> None:
        programs = self.directory / "bin"
        programs.mkdir(exist_ok=True)
        (programs / "outbox").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m outbox "$@"\n')
        (programs / "outbox").chmod(0o755)
        env = environment(self.env)
        env["PATH"] = f"{programs}:{Path(sys.executable).parent}:{env['PATH']}"
        process = await asyncio.create_subprocess_exec(
            *("sh", "-euc", text),
            cwd=self.directory,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed = (await process.communicate())[0].decode()
        assert bool(process.returncode) is bool(_FAILURE.search(output)), printed
        if output.strip():
            self._compare(output, printed)

    async def _run_python(self, text: str) -> None:
        code = compile(text, "<document>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, self.names)  # noqa: S307 (our own documents)
        if inspect.isawaitable(result):
            await result

    async def end(self) -> None:
        """Stop the running processes, and compare their output with the document."""
        for process, _, _ in self._running:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()
        for _, path, output in self._running:
            printed = normalized(path.read_text())
            assert all(line in printed for line in normalized(output)), printed
