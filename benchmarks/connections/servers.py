"""HTTP servers of other projects, each with an idle time-out of one second.

A server is measured if its program is in PATH.  Modules of Node are found by NODE_PATH, those of
Ruby by GEM_PATH, and libraries of Java by CLASSPATH.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.errors import CannotRun
from outbox_devtools.embedded.launch import command
from tests.support.ports import free_port
from tests.support.process import environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

CONFIGURATION = Path(__file__).with_name("configuration")
START_S = 30.0
"""Limit for a start, with a compiler where there is one."""
END_S = 5.0
OUTPUT_CHARS_MAX = 200
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)*")
_JAVA_VERSION = ("-version",)


@dataclass(frozen=True, slots=True)
class HttpServer:
    """How a server is started in a directory of its own."""

    name: str
    words: tuple[str, ...]
    """Program and arguments; `@port@`, `@directory@` and, of the program's installation, `@prefix@`
    are replaced, also in the files."""
    files: tuple[str, ...] = ()
    """Names in the folder `configuration`."""
    version: tuple[str, ...] = ("--version",)
    """Arguments with which the program prints its version; empty: there are none."""
    build: tuple[str, ...] = ()
    """A command that runs before."""

    @property
    def program(self) -> str | None:
        """The program's path; None: it is not installed."""
        return shutil.which((self.build or self.words)[0])


def _python(*words: str) -> tuple[str, ...]:
    return sys.executable, "receiver.py", *words, "@port@"


def _asgi(program: str, *words: str) -> tuple[str, ...]:
    return program, *words, "receiver:asgi"


_GUNICORN = ("gunicorn", "--bind", "127.0.0.1:@port@", "--keep-alive", "1", "--log-level", "error")
_UVICORN = ("--port", "@port@", "--timeout-keep-alive", "1", "--log-level", "error")

SERVERS = (
    HttpServer(
        "nginx", ("nginx", "-p", "@directory@", "-c", "nginx.conf"), ("nginx.conf",), ("-v",)
    ),
    HttpServer(
        "Apache, event",
        ("apache2", "-DFOREGROUND", "-f", "@directory@/apache.conf"),
        ("apache.conf",),
        ("-v",),
    ),
    HttpServer(
        "lighttpd",
        ("lighttpd", "-D", "-m", "@prefix@/lib/lighttpd", "-f", "lighttpd.conf"),
        ("lighttpd.conf", "index.sh"),
        ("-v",),
    ),
    HttpServer("HAProxy", ("haproxy", "-db", "-f", "haproxy.cfg"), ("haproxy.cfg",), ("-v",)),
    HttpServer("Caddy", ("caddy", "run", "--config", "Caddyfile"), ("Caddyfile",), ("version",)),
    HttpServer("uvicorn, h11", _asgi("uvicorn", "--http", "h11", *_UVICORN), ("receiver.py",)),
    HttpServer(
        "uvicorn, httptools", _asgi("uvicorn", "--http", "httptools", *_UVICORN), ("receiver.py",)
    ),
    HttpServer(
        "hypercorn",
        _asgi("hypercorn", "--bind", "127.0.0.1:@port@", "--keep-alive", "1"),
        ("receiver.py",),
    ),
    HttpServer(
        "granian",
        _asgi(
            "granian",
            "--interface",
            "asgi",
            "--port",
            "@port@",
            "--no-log",
            "--http1-header-read-timeout",
            "1000",
        ),
        ("receiver.py",),
    ),
    HttpServer("gunicorn, sync", (*_GUNICORN, "receiver:wsgi"), ("receiver.py",)),
    HttpServer(
        "gunicorn, gthread", (*_GUNICORN, "--threads", "64", "receiver:wsgi"), ("receiver.py",)
    ),
    HttpServer(
        "waitress",
        (
            "waitress-serve",
            "--host",
            "127.0.0.1",
            "--port",
            "@port@",
            "--channel-timeout",
            "1",
            "--cleanup-interval",
            "1",
            "receiver:wsgi",
        ),
        ("receiver.py",),
        (),
    ),
    HttpServer("aiohttp", _python("aiohttp"), ("receiver.py",)),
    HttpServer("Python http.server", _python("http.server"), ("receiver.py",)),
    HttpServer("Node http", ("node", "node.cjs", "http", "@port@"), ("node.cjs",)),
    HttpServer("Express", ("node", "node.cjs", "express", "@port@"), ("node.cjs",)),
    HttpServer("Fastify", ("node", "node.cjs", "fastify", "@port@"), ("node.cjs",)),
    HttpServer("Koa", ("node", "node.cjs", "koa", "@port@"), ("node.cjs",)),
    HttpServer(
        "Go net/http",
        ("@directory@/receiver", "@port@"),
        ("main.go",),
        ("version",),
        build=("go", "build", "-o", "receiver", "main.go"),
    ),
    HttpServer(
        "JDK httpserver",
        (
            "java",
            "-Dsun.net.httpserver.idleInterval=1",
            "-Dsun.net.httpserver.clockTick=1000",
            "Jdk.java",
            "@port@",
        ),
        ("Jdk.java",),
        _JAVA_VERSION,
    ),
    HttpServer("Jetty", ("java", "Jetty.java", "@port@"), ("Jetty.java",), _JAVA_VERSION),
    HttpServer(
        "Tomcat", ("java", "Tomcat.java", "@port@", "@directory@"), ("Tomcat.java",), _JAVA_VERSION
    ),
    HttpServer("Puma", ("puma", "-C", "puma.rb"), ("puma.rb",)),
)


async def describe(server: HttpServer) -> str:
    """Its name, and the version that its program prints, which may be an interpreter."""
    assert server.program is not None
    if not server.version:
        return server.name
    _, output = await _output((server.program, *server.version), Path.cwd())
    found = _VERSION.search(output)
    program = Path(server.program).name
    return server.name if found is None else f"{server.name} ({program} {found[0]})"


@asynccontextmanager
async def serving(server: HttpServer, directory: Path) -> AsyncIterator[str]:
    """Run a server, and return its URL.

    Raises:
        CannotRun: it is not installed, or does not start.
    """
    if server.program is None:
        raise CannotRun(f"{(server.build or server.words)[0]} is not in PATH")
    port = free_port()
    values = {
        "port": str(port),
        "directory": str(directory),
        "prefix": str(Path(server.program).parents[1]),
    }
    _write_files(server, directory, values)
    if server.build:
        code, output = await _output(server.build, directory)
        if code:
            raise CannotRun(f"{server.build[0]}: {output[-OUTPUT_CHARS_MAX:]}")
    words = [_replaced(word, values) for word in server.words]
    if not server.build:
        words[0] = server.program
    log_path = directory / "output.log"
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command(words, account=None),
            cwd=directory,
            env=environment(),
            stdout=log,
            stderr=log,
        )
    try:
        await _wait_for(port, process, log_path)
        yield f"http://127.0.0.1:{port}/"
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _write_files(server: HttpServer, directory: Path, values: Mapping[str, str]) -> None:
    directory.mkdir()
    # Some servers drop their privileges before they read it.
    directory.chmod(0o755)
    for name in server.files:
        text = (CONFIGURATION / name).read_text("utf-8")
        (directory / name).write_text(_replaced(text, values), "utf-8")


def _last_output(log: Path) -> str:
    return " ".join(log.read_text("utf-8", "replace").split())[-OUTPUT_CHARS_MAX:]


def _replaced(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


async def _wait_for(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    try:
        async with asyncio.timeout(START_S):
            while process.returncode is None:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        pass
    raise CannotRun(f"it does not start: {_last_output(log)}")


async def _output(words: tuple[str, ...], directory: Path) -> tuple[int, str]:
    """Exit code and output of a command."""
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=directory,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode("utf-8", "replace")
