"""The programs with which the receiver packages of other languages are tested.

Each package has three: `server`, `order` and `verify`; `receivers/README.md` describes them.  They
are built once into the ignored directory `build`, from a copy of the sources.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from outbox.errors import CannotRun
from outbox_devtools.embedded.launch import command
from tests.support.receiver_process import ReceiverProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

ROOT = Path(__file__).parents[2]
PQ = "/usr/share/gocode/src/github.com/lib/pq"
"""A driver for Go, of Debian's golang-github-lib-pq-dev, so that nothing is fetched."""
NOT_COPIED = ("node_modules", "dist", "build")
BUILD_S, RESPONSE_S = 180, 30

EFFECTS = """
CREATE TABLE effect (
    id bigint GENERATED ALWAYS AS IDENTITY, event_id text, type text, key text, data text)
"""
"""What the servers write in the transaction of a delivery."""


@dataclass(frozen=True)
class Language:
    """A receiver package, and how its programs are built and started.

    Args:
        needs: programs and directories without which it cannot be built.
        build: commands, each in a directory of the package.
        start: the command line of each program, from there.
        adapters: values of OUTBOX_ADAPTER.
    """

    name: str
    needs: tuple[str, ...]
    build: tuple[tuple[str, tuple[str, ...]], ...]
    start: Mapping[str, tuple[str, ...]]
    adapters: tuple[str, ...] = ("",)

    @property
    def sources(self) -> Path:
        return ROOT / "receivers" / self.name

    def built(self) -> Path:
        """The directory of the built package.

        Raises:
            CannotRun: a compiler is missing, or a dependency of the tests cannot be fetched.
        """
        for each in self.needs:
            if shutil.which(each) is None and not Path(each).is_dir():
                raise CannotRun(f"{each} is not here")
        target = ROOT / "build" / "receivers" / f"{self.name}-{_digest(self.sources)}"
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        # One process builds, and the others wait for the result.
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                self._build(target)
        return target

    def _build(self, target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent) as room:
            copy = Path(room) / "package"
            shutil.copytree(self.sources, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
            for directory, words in self.build:
                run_step(words, copy / directory)
            # Renamed when complete, so that an interrupted build leaves nothing that looks built.
            copy.rename(target)


NPM_CI = "npm ci --ignore-scripts --no-audit --no-fund --loglevel=error"
TYPESCRIPT = Language(
    "typescript",
    needs=("node", "npm"),
    build=((".", tuple(NPM_CI.split())), (".", ("npm", "run", "--silent", "build"))),
    start={name: ("node", f"build/programs/{name}.js") for name in ("server", "order", "verify")},
    adapters=("node", "express", "fastify", "fetch"),
)
GO = Language(
    "go",
    needs=("go", PQ),
    build=(
        (".", ("go", "build", "-o", "bin/order", "./internal/order")),
        (".", ("go", "build", "-o", "bin/verify", "./internal/verify")),
        ("internal/testserver", ("go", "build", "-o", "../../bin/server", ".")),
    ),
    start={name: (f"bin/{name}",) for name in ("server", "order", "verify")},
)
LANGUAGES = (TYPESCRIPT, GO)


def _digest(sources: Path) -> str:
    files = sorted(
        path
        for path in sources.rglob("*")
        if path.is_file() and not set(path.relative_to(sources).parts) & set(NOT_COPIED)
    )
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.relative_to(sources)}\0{path.stat().st_size}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def run_step(words: tuple[str, ...], directory: Path) -> None:
    """Run a command of a build.

    Raises:
        CannotRun: it could not fetch what it needs.
    """
    # A lock file decides the versions; a registry that does not respond fails at once.
    env = {**os.environ, "npm_config_fetch_retries": "0", "GOFLAGS": "-mod=mod"}
    try:
        done = subprocess.run(
            words, cwd=directory, env=env, capture_output=True, text=True, timeout=BUILD_S
        )
    except subprocess.TimeoutExpired:
        raise CannotRun(f"{words[0]} did not end within {BUILD_S} s") from None
    if done.returncode:
        output = done.stderr or done.stdout
        # What cannot be fetched is a reason not to test; what cannot be compiled is not.
        if any(each in output for each in ("registry", "network", "dial tcp", "ENOTFOUND")):
            raise CannotRun(f"{' '.join(words[:2])} could not fetch its packages")
        raise AssertionError(f"{' '.join(words)}:\n{output}")


class LineProgram:
    """A program that responds to each line of JSON with one."""

    def __init__(self, language: Language, name: str) -> None:
        built = language.built()
        self._process = subprocess.Popen(
            command([*_absolute(language.start[name], built)], account=None),
            cwd=built,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def exchange(self, given: Any) -> Any:
        """The response to one line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(orjson.dumps(given) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"it ended: {self._process.poll()}"
        return orjson.loads(line)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(RESPONSE_S)
        finally:
            self._process.kill()
            assert self._process.stdout is not None
            self._process.stdout.close()


class ServerProgram(ReceiverProcess):
    """The server of a package."""

    def __init__(self, language: Language, directory: Path, **settings: str) -> None:
        built = language.built()
        words = _absolute(language.start["server"], built)
        super().__init__(words, built, directory / f"{language.name}.log", **settings)
        self.settings["OUTBOX_LISTEN"] = f"127.0.0.1:{self.port}"

    async def processed(self) -> list[str]:
        """The ids of the processed events, in order."""
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"{self.url}/processed") as response,
        ):
            ids: list[str] = await response.json(content_type=None)
            return ids

    async def catch_up(self) -> int:
        """Let it fetch what it has not received; returns the number of processed deliveries."""
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{self.url}/catch-up") as response,
        ):
            assert response.status == 200, await response.text()
            return int((await response.json(content_type=None))["processed"])


def _absolute(words: tuple[str, ...], built: Path) -> list[str]:
    first = built / words[0]
    return [str(first) if first.exists() else shutil.which(words[0]) or words[0], *words[1:]]


@asynccontextmanager
async def serving(
    language: Language, directory: Path, **settings: str
) -> AsyncIterator[ServerProgram]:
    """A receiver that responds, killed at the end."""
    server = ServerProgram(language, directory, **settings)
    try:
        await server.start()
        await server.responses()
        yield server
    finally:
        await server.kill()
