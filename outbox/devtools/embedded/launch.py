"""Starting a program so that it cannot outlive this process.

The program is started through `_drop_privileges.py`, a few lines of Python that change
the user, ask the kernel for a signal when the parent dies, and then turn into
the program.  It is a script and not a `preexec_fn`, because that runs in a
fork of a possibly threaded process (a known deadlock, and a warning from
Python 3.12 on).
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

    from outbox.devtools.embedded.run_as_user import Account

T = TypeVar("T")


def command(argv: Sequence[str], account: Account | None) -> list[str]:
    """`argv`, run as `account` and ended with the thread that starts it."""
    script = Path(__file__).with_name("_drop_privileges.py")
    uid, gid = (account.uid, account.gid) if account else (-1, -1)
    # -I and -S: whatever the surroundings do to Python does not reach it.
    become = [sys.executable, "-I", "-S", str(script), str(os.getpid()), str(uid), str(gid)]
    return [*become, *argv]


def environment() -> dict[str, str]:
    """Our environment without `PG*`, and with untranslated messages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return kept | {"LC_ALL": "C", "TZ": "UTC"}


class _Keeper:
    """One thread that lives as long as this process and starts all servers.

    The kernel's parent-death signal follows the *thread* that forked, so a
    server started from a pool's thread would end with the pool.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()

    def run(self, call: Callable[[], T]) -> T:
        """Run `call` on the thread and hand back what it returns or raises."""
        outcome: Future[T] = Future()
        with self._lock:
            # A thread does not survive into a forked child.
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


keeper = _Keeper()
