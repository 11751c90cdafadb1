"""Databases that are cloned ahead of the tests that need them, and dropped behind them.

Both together take 30 ms of processor time, and longer than that on a busy machine, which is more
than most tests take.  A thread does it while tests run, so that a test finds its database ready.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

AHEAD = 2
"""Databases that are ready for the next tests."""
BEHIND_MAX = 16
"""Databases that wait to be dropped before further ones are made: each takes 10 MB of memory."""
WAIT_S = 60.0
"""How long a test waits for its database, on a machine that is busy."""

_FIND_PREPARED = "SELECT quote_literal(gid) AS gid FROM pg_prepared_xacts WHERE database = %s"


Connect = Callable[[str], "psycopg.Connection[Any]"]
"""Opens a connection to a database, with autocommit."""


def drop(maintenance: psycopg.Connection[Any], connect: Connect, name: str) -> None:
    """Drop a database, whatever is open in it.

    Args:
        maintenance: a connection to another database of the server.
        connect: opens further ones.
        name: the database to drop.
    """
    prepared = maintenance.execute(_FIND_PREPARED, [name]).fetchall()
    if prepared:  # Prepared transactions would prevent the drop.
        with connect(name) as inside:
            for (gid,) in prepared:
                inside.execute(f"ROLLBACK PREPARED {gid}".encode())
    maintenance.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


class Clones:
    """Clones of one template, made by a thread.

    Args:
        connect: opens a connection to a database.
        home: the database from which others are created and dropped.
        create: the statement that creates a clone, as a format of its name.
        next_name: returns a name of a database, each once.
    """

    def __init__(
        self, connect: Connect, home: str, create: str, next_name: Callable[[], str]
    ) -> None:
        self._connect = connect
        self._home = home
        self._create = create
        self._next_name = next_name
        self._ready: deque[str] = deque()
        self._behind: deque[str] = deque()
        self._changed = Condition()
        self._at_work = Lock()
        self._failure: Exception | None = None
        self._is_ended = False
        self._thread = Thread(target=self._run, name="clones", daemon=True)
        self._thread.start()

    def claim(self) -> str:
        """Return the name of a new database; wait until one is ready."""
        with self._changed:
            is_ready = self._changed.wait_for(lambda: self._ready or self._failure, WAIT_S)
            if self._failure is not None:
                raise RuntimeError("the databases of tests cannot be made") from self._failure
            assert is_ready, f"no database was ready within {WAIT_S:g} s"
            name = self._ready.popleft()
            self._changed.notify()
            return name

    def give_back(self, name: str) -> None:
        """Drop a database later."""
        with self._changed:
            self._behind.append(name)
            self._changed.notify()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Make and drop no database while the block runs."""
        with self._at_work:
            yield

    def end(self) -> None:
        """End the thread; the databases that are left end with their server."""
        with self._changed:
            self._is_ended = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._connect(self._home) as maintenance:
                while (step := self._next_step()) is not None:
                    with self._at_work:
                        step(maintenance)
        except Exception as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next_step(self) -> Callable[[psycopg.Connection[Any]], None] | None:
        """Return what to do next: databases are made before others are dropped; None: the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_ended or self._behind or len(self._ready) < AHEAD
            )
            if self._is_ended:
                return None
            if len(self._ready) < AHEAD and len(self._behind) < BEHIND_MAX:
                return self._make
            name = self._behind.popleft()
            return lambda maintenance: drop(maintenance, self._connect, name)

    def _make(self, maintenance: psycopg.Connection[Any]) -> None:
        name = self._next_name()
        maintenance.execute(self._create.format(name).encode())
        with self._changed:
            self._ready.append(name)
            self._changed.notify_all()
