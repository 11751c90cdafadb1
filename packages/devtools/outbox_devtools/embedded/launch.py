"""Starts programs that cannot outlive this process.

A program is started through `_drop_privileges.py`, which changes the user, sets the
parent-death signal, and execs the program.  It is a script and not a `preexec_fn`, because that
runs in a fork of a possibly threaded process (a known deadlock, and a warning from Python 3.12
on).
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox_devtools.embedded.run_as_user import Account

T = TypeVar("T")


def command(argv: Sequence[str], account: Account | None) -> list[str]:
    """Wrap `argv` to run as `account` and to end with the thread that starts it."""
    script = Path(__file__).with_name("_drop_privileges.py")
    uid, gid = (account.uid, account.gid) if account else (-1, -1)
    # -I and -S isolate the script from the environment and from site-packages.
    wrapper = [sys.executable, "-I", "-S", str(script), str(os.getpid()), str(uid), str(gid)]
    return [*wrapper, *argv]


def environment() -> dict[str, str]:
    """Return this process's environment without `PG*`, with untranslated messages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return kept | {"LC_ALL": "C", "TZ": "UTC"}


class _SpawnThread:
    """A thread that lives as long as this process and starts all servers.

    The parent-death signal is tied to the *thread* that forked, so a server started from a
    thread pool would end with the pool's thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()

    def run(self, call: Callable[[], T]) -> T:
        """Run `call` on the thread; returns its result or raises its error."""
        outcome: Future[T] = Future()
        with self._lock:
            # A forked child has no copy of the thread.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._serve, name="embedded-postgres", daemon=True
                )
                self._thread.start()
        self._calls.put((call, outcome))
        return outcome.result()

    def _serve(self) -> None:
        while True:
            call, outcome = self._calls.get()
            try:
                outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)
            del call, outcome


spawn_thread = _SpawnThread()
