"""A RabbitMQ server with the stream plugin, from Debian's packages, unpacked and not installed."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from outbox.errors import CannotRun
from tests.support.ports import free_ports
from tests.support.waiting import until_sync

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

UNPACKED = Path(__file__).parents[3] / ".brokers" / "rabbitmq"
"""Where the packages are unpacked, once."""
PACKAGES = (
    "rabbitmq-server",
    "erlang-asn1",
    "erlang-base",
    "erlang-crypto",
    "erlang-eldap",
    "erlang-inets",
    "erlang-mnesia",
    "erlang-os-mon",
    "erlang-parsetools",
    "erlang-public-key",
    "erlang-runtime-tools",
    "erlang-ssl",
    "erlang-syntax-tools",
    "erlang-tools",
    "erlang-xmerl",
)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
COOKIE = "outboxtests"
USER, PASSWORD = "guest", "guest"
_calls = itertools.count(1)
"""Names of callers: a server refuses a name whose last connection it has not ended yet."""


class TlsFiles(NamedTuple):
    """PEM files of the server."""

    ca: Path
    """Of the clients' certificates."""
    certificate: Path
    key: Path


def unpack() -> Path:
    """Return the directory of the unpacked packages; fetches them once.

    Raises:
        CannotRun: this machine has no apt, or no access to the packages.
    """
    UNPACKED.mkdir(parents=True, exist_ok=True)
    with (UNPACKED / "lock").open("w") as lock:
        # Other processes of tests may need it at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _unpack()


def _unpack() -> Path:
    root = UNPACKED / "root"
    if root.exists():
        return root
    fetched, partial = UNPACKED / "packages", UNPACKED / "partial"
    for directory in (fetched, partial):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(
            ("/usr/bin/apt-get", "download", *PACKAGES),
            cwd=fetched,
            check=True,
            capture_output=True,
        )
        for package in fetched.glob("*.deb"):
            subprocess.run(
                ("/usr/bin/dpkg", "-x", package, partial), check=True, capture_output=True
            )
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotRun(f"RabbitMQ's Debian packages cannot be unpacked: {error}") from error
    partial.rename(root)
    return root


class RabbitMq:
    """A server on 127.0.0.1, during a `with` block.

    Args:
        settings: further lines of `rabbitmq.conf`.
    """

    def __init__(
        self, directory: Path, tls: TlsFiles | None = None, settings: Sequence[str] = ()
    ) -> None:
        root = unpack()
        self._erlang = root / "usr/lib/erlang"
        (self._home,) = (root / "usr/lib/rabbitmq/lib").glob("rabbitmq_server-*")
        (self._programs,) = self._erlang.glob("erts-*/bin")
        self._directory = directory
        self.port, self.tls_port, self._distribution_port, self._epmd_port = free_ports(4)
        self._tls = tls
        self._settings = settings
        self._epmd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> RabbitMq:
        for name in ("log", "data", "home"):
            (self._directory / name).mkdir(parents=True, exist_ok=True)
        cookie = self._directory / "home" / ".erlang.cookie"
        cookie.write_text(COOKIE)
        cookie.chmod(0o400)
        self._write_settings()
        self._log = (self._directory / "server.log").open("ab")
        # In the foreground: Erlang starts one as a daemon otherwise, which stays.
        self._epmd = self._spawn(
            self._programs / "epmd", "-address", "127.0.0.1", "-port", str(self._epmd_port)
        )
        try:
            self.start()
            self._keep_coordinator()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait()
        if self._log is not None:
            self._log.close()

    def start(self) -> None:
        """Start the server, and wait until it accepts connections for streams.

        It ends with the thread that calls this.
        """
        until_sync(lambda: _responses(self._epmd_port), what="the port mapper")
        self._server = self._spawn(
            self._programs / "erlexec",
            *("-pa", "", "-noinput", "-s", "rabbit", "boot", "-boot", "start_sasl"),
            *("+sbwt", "none", "+sbwtdcpu", "none", "+sbwtdio", "none", "+B", "i"),
            *("-kernel", "inet_dist_use_interface", "{127,0,0,1}"),
            *("-kernel", "prevent_overlapping_partitions", "false"),
            *("-syslog", "logger", "[]", "-syslog", "syslog_error_logger", "false"),
        )
        until_sync(self._is_started, timeout_s=90, what="RabbitMQ")

    def kill(self) -> None:
        """Kill -9, and wait for the end."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the server's process during the block; the kernel accepts its data."""
        assert self._server is not None
        self._server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._server.send_signal(signal.SIGCONT)

    def evaluate(self, expression: str) -> str:
        """Evaluate an Erlang expression on the server."""
        done = subprocess.run(
            (
                *(self._programs / "erl_call", "-address", f"127.0.0.1:{self._distribution_port}"),
                *("-h", f"call{next(_calls)}", "-c", COOKIE, "-e"),
            ),
            input=f"{expression}.\n".encode(),
            capture_output=True,
            check=True,
            env=self._environment,
            timeout=30,
        )
        output = done.stdout.decode()
        assert output.startswith("{ok,"), output
        return output[5:-1].strip()

    def add_user(
        self, name: str, password: str, *, configure: str = "", write: str = "", read: str = ""
    ) -> None:
        """Add a user with rights to the names that match the patterns."""
        module, who = "rabbit_auth_backend_internal", f'<<"{name}">>'
        rights = ", ".join(f'<<"{each or "^$"}">>' for each in (configure, write, read))
        self.evaluate(
            f'{module}:add_user({who}, <<"{password}">>, <<"tests">>), '
            f'{module}:set_permissions({who}, <<"/">>, {rights}, <<"tests">>)'
        )

    def kill_writer(self, stream: str) -> None:
        """Kill the process that writes a stream; its supervisor starts another one."""
        self.evaluate(
            f'{{ok, Pid}} = rabbit_stream_manager:lookup_leader(<<"/">>, <<"{stream}">>), '
            "exit(Pid, kill)"
        )

    def _keep_coordinator(self) -> None:
        """Create a stream, and store the name of the coordinator that starts with it.

        RabbitMQ has that name in memory for three seconds (dets, `delayed_write`).  A server that
        is killed meanwhile finds no coordinator, and none of its streams is ever available again.
        """
        self.evaluate(
            '{ok, _} = rabbit_stream_manager:create(<<"/">>, <<"first">>, #{}, <<"tests">>), '
            "ok = dets:sync(ra_coordination_directory_reverse)"
        )

    def _is_started(self) -> bool:
        assert self._server is not None
        if self._server.poll() is not None:
            log = (self._directory / "server.log").read_text(errors="replace")
            raise AssertionError(f"RabbitMQ ended while it started: {log[-2000:]}")
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            return self.evaluate("rabbit:is_running()") == "true" and _responses(self.port)
        return False

    def _write_settings(self) -> None:
        lines = [
            "listeners.tcp = none",
            f"stream.listeners.tcp.1 = 127.0.0.1:{self.port}",
            "stream.advertised_host = localhost",
            f"stream.advertised_port = {self.port}",
            "disk_free_limit.absolute = 1MB",
            "loopback_users.guest = true",
            *self._settings,
        ]
        if self._tls is not None:
            lines += [
                f"stream.listeners.ssl.1 = 127.0.0.1:{self.tls_port}",
                f"ssl_options.cacertfile = {self._tls.ca}",
                f"ssl_options.certfile = {self._tls.certificate}",
                f"ssl_options.keyfile = {self._tls.key}",
                "ssl_options.verify = verify_peer",
                "ssl_options.fail_if_no_peer_cert = false",
            ]
        (self._directory / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
        (self._directory / "enabled_plugins").write_text("[rabbitmq_stream].\n")

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "ROOTDIR": str(self._erlang),
            "BINDIR": str(self._programs),
            "EMU": "beam",
            "PROGNAME": "erl",
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "HOME": str(self._directory / "home"),
            "ERL_LIBS": str(self._home / "plugins"),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "SYS_PREFIX": "",
            "RABBITMQ_HOME": str(self._home),
            "RABBITMQ_PLUGINS_DIR": str(self._home / "plugins"),
            "RABBITMQ_LOG_BASE": str(self._directory / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_MNESIA_BASE": str(self._directory / "data"),
            "RABBITMQ_NODENAME": "tests@localhost",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._directory / "enabled_plugins"),
            "RABBITMQ_CONFIG_FILE": str(self._directory / "rabbitmq"),
        }

    def _spawn(self, *command: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(each) for each in command],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _responses(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
