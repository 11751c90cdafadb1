"""The process of the API as the child of a relay; see `outbox.hosting.api_child`.

It yields to the relay: a lower priority, a limit of its memory, and the first choice of a kernel
that is out of memory.  It ends when its input ends, which the relay alone holds open, even if its
own event loop does not respond; on Linux, also if it is frozen.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from outbox.errors import CannotRun, OutboxError
from outbox.version import __version__

if TYPE_CHECKING:
    from outbox.config import Settings

NICE = 10
CHILD_MEMORY_MIN, CHILD_MEMORY_MAX = 256 * 1024**2, 1024**3
CONTAINER_SHARE = 0.25
CONTAINER_MEMORY = Path("/sys/fs/cgroup/memory.max")
"""The limit of a container, in bytes or `max`: cgroups(7).  Kubernetes ends all of its processes at
this limit, so the child has a share of it."""
OOM_SCORE_ADJ, OOM_SCORE_ADJ_MAX = 500, 1000
"""How much sooner it is ended than a relay of the same size: proc_pid_oom_score_adj(5)."""
INPUT_FD = 0
PR_SET_PDEATHSIG = 1
STOP_S = 2.0
"""How long requests may take to end after the input has ended."""


def main() -> int:
    """Serve until the input ends; returns the exit code."""
    # Ctrl-C reaches all processes of a terminal, and SIGTERM by systemd all processes of a service,
    # while the relay still drains.  The relay decides when this one ends.
    # It blocks them in a child that starts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _end_with_relay()
    _limit_memory()
    given = orjson.loads(_read_line())
    try:
        if given["version"] != __version__:
            raise CannotRun(
                f"outbox-api has version {__version__}, the relay that starts it "
                f"{given['version']}; restart the relay"
            )
        # Imported after the check: what is imported may be of another version, too.
        from outbox.api_settings import take_over
        from outbox.event_loop import loop_factory
        from outbox.telemetry.logs import configure

        settings = take_over(given["settings"])
        configure(settings)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(settings, given))
    except OutboxError as error:
        os.write(given["report"], orjson.dumps({"failure": str(error)}) + b"\n")
        return error.exit_code
    return 0


def _end_with_relay() -> None:
    """Let the kernel kill this process when the relay is gone, also if it is frozen then.

    A relay that ended before has closed the input.

    Source: PR_SET_PDEATHSIG(2const).
    """
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):
            import ctypes

            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _limit_memory() -> None:
    with suppress(OSError):
        adjusted = Path("/proc/self/oom_score_adj")
        score = int(adjusted.read_text(encoding="ascii"))  # The relay's, such as 999 of a pod.
        adjusted.write_text(str(min(score + OOM_SCORE_ADJ, OOM_SCORE_ADJ_MAX)), encoding="ascii")
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes_max(), hard))


def memory_bytes_max() -> int:
    """The memory that this process may have, in bytes."""
    try:
        limit = int(CONTAINER_MEMORY.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return CHILD_MEMORY_MAX
    return max(CHILD_MEMORY_MIN, min(int(limit * CONTAINER_SHARE), CHILD_MEMORY_MAX))


def _read_line() -> bytes:
    """The first line of the input, after which nothing comes."""
    line = b""
    while not line.endswith(b"\n"):
        if not (part := os.read(INPUT_FD, 65_536)):
            sys.exit(0)  # The relay has ended.
        line += part
    return line


async def _serve(settings: Settings, given: dict[str, Any]) -> None:
    from outbox.web.address import parse_address
    from outbox_api.process import serving

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    threading.Thread(target=_end_with_input, args=(loop, stop), daemon=True).start()
    listeners = {
        name: (parse_address(each["address"]), [socket.socket(fileno=fd) for fd in each["sockets"]])
        for name, each in given["listeners"].items()
    }
    # The end of the loop closes its copy; what ended it is reported afterwards.
    reports, _ = await loop.connect_write_pipe(
        asyncio.BaseProtocol, os.fdopen(os.dup(given["report"]), "wb", buffering=0)
    )
    async with serving(settings, listeners) as shared:
        # Not before: at this priority, it might never start beside relays that use all processors.
        # On Linux this is of a thread; those that start later inherit it.
        with suppress(AttributeError, OSError):  # Not on Windows.
            os.nice(NICE)
        while not stop.is_set():
            if not reports.get_write_buffer_size():  # A relay that stands still reads nothing.
                state = {"problem": shared.problem, "metrics": shared.meters.to_json()}
                reports.write(orjson.dumps(state) + b"\n")
            with suppress(TimeoutError):
                async with asyncio.timeout(given["heartbeat_s"]):
                    await stop.wait()


def _end_with_input(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(INPUT_FD, 1):
        pass
    with suppress(RuntimeError):  # The loop has ended.
        loop.call_soon_threadsafe(stop.set)
    time.sleep(STOP_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
