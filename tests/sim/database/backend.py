"""Sessions of the simulated server, each with one statement at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg

from tests.sim.database.engine import Transaction, Wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.database.engine import Engine, Steps


class Client:
    """Receives the results of a backend."""

    def response(self, result: Any, error: Exception | None) -> None:
        raise NotImplementedError

    def notification(self, channel: str, pid: int, payload: str) -> None:
        raise NotImplementedError

    def closed(self) -> None:
        raise NotImplementedError


class Backend:
    """One session."""

    def __init__(self, engine: Engine, name: str, client: Client) -> None:
        self.engine = engine
        self.pid = engine.new_pid()
        engine.backends[self.pid] = self
        self.name = name
        self.client = client
        self.alive = True
        self.idle_timeout_s = 0.0
        # The server's process makes no progress before this time, as when a disk hangs; it
        # keeps the locks that it has, or is granted.
        self.stalled_until = 0.0
        # It has received the first half of a statement: such a session is not idle.
        self.half_sent = False
        self._tx: Transaction | None = None
        self._statement: Steps[Any] | None = None
        self._own: Transaction | None = None
        self._number = 0
        self._token = 0
        self._client_closed = False
        # When the client last received a result, or half a statement arrived.
        self.quiet_since = engine.world.now

    @property
    def transaction(self) -> Transaction | None:
        """The open transaction of several statements."""
        return self._tx

    @property
    def at_work(self) -> bool:
        """Whether a statement is executed, or waits for a lock."""
        return self.alive and self._statement is not None

    @property
    def commits(self) -> bool:
        """Whether a commit is under way, which cannot be ended."""
        return self.alive and self._own is not None and self._own.committing

    @property
    def silent_since(self) -> float | None:
        """Since when it has waited for its client in a transaction or a statement."""
        waits = self.half_sent or self._tx is not None
        return self.quiet_since if self.alive and waits and self._statement is None else None

    # ------------------------------------------------------------ statements

    def begin(self) -> Transaction:
        self._number += 1
        self._tx = Transaction(self.engine, f"{self.pid}/{self._number}", explicit=True)
        self.quiet_since = self.engine.world.now
        return self._tx

    def execute(self, make: Callable[[Transaction], Any]) -> None:
        """Execute a statement and send its result to the client."""
        if not self.alive:
            return
        self._token += 1
        tx = self._tx
        if tx is None:
            self._number += 1
            tx = Transaction(self.engine, f"{self.pid}/{self._number}", explicit=False)
        elif tx.failed:
            self._send_result(
                None, asyncpg.InFailedSQLTransactionError("the transaction is aborted")
            )
            return
        self.engine.statements += 1
        self._own = tx
        self._statement = self._steps(tx, make)
        self._go_on(None)

    def _steps(self, tx: Transaction, make: Callable[[Transaction], Any]) -> Steps[Any]:
        result = make(tx)
        if hasattr(result, "send"):
            result = yield from result
        if not tx.explicit:
            yield from self.commit_steps(tx)
        return result

    def commit_steps(self, tx: Transaction) -> Steps[None]:
        """Flush, make the writes visible, then release the locks."""
        if tx.written:
            tx.committing = True
            yield self.engine.pause_s()
            self.engine.apply(tx)
            yield self.engine.pause_s()
        self.engine.release(tx)

    def end_transaction(self) -> None:
        """Forget the open transaction of several statements."""
        self._tx = None

    def commit(self, tx: Transaction) -> None:
        """COMMIT of a transaction of several statements."""
        self._token += 1
        self._own = tx
        self._statement = self.commit_steps(tx)
        self._go_on(None)

    def _go_on(self, error: Exception | None) -> None:
        statement = self._statement
        assert statement is not None
        try:
            request = statement.throw(error) if error is not None else statement.send(None)
        except StopIteration as stop:
            self._finish(stop.value, None)
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as failure:
            self._finish(None, failure)
        else:
            self._token += 1
            if isinstance(request, Wait):
                self._lock(request)
            else:
                world = self.engine.world
                until = max(world.now + request, self.stalled_until)
                world.at(until, None, self._resume, self._token)

    def _lock(self, wait: Wait) -> None:
        tx = self._own
        assert tx is not None
        token, began_at = self._token, self.engine.world.now
        if self.engine.try_lock(tx, wait.key, wait.mode):
            if self.stalled_until > began_at:
                self._granted(token)
            else:
                self._go_on(None)
            return

        def granted() -> None:
            for watcher in self.engine.on_granted:
                watcher(wait, self.engine.world.now - began_at)
            self._granted(token)

        self.engine.wait_for(tx, wait.key, wait.mode, granted)
        if tx.lock_timeout_s:
            self.engine.world.after(tx.lock_timeout_s, None, self._timed_out, token)

    def _granted(self, token: int) -> None:
        """Continue with the lock, after the end of a stall."""
        self.engine.world.at(self.stalled_until, None, self._resume, token)

    def _timed_out(self, token: int) -> None:
        tx = self._own
        if token == self._token and self.alive and tx is not None:
            if not self.engine.waits(tx):
                return  # The lock was granted at the same moment.
            self.engine.stop_waiting(tx)
            self._go_on(asyncpg.LockNotAvailableError("canceling statement due to lock timeout"))

    def _resume(self, token: int) -> None:
        if token == self._token and self.alive and self._statement is not None:
            self._go_on(None)

    def _finish(self, result: Any, error: Exception | None) -> None:
        tx = self._own
        self._statement = self._own = None
        self._token += 1
        if error is not None and tx is not None:
            if tx.explicit and tx is self._tx:
                tx.failed = True
            else:
                self.engine.abort(tx)
        if self._client_closed:
            self._leave()
            return
        self._send_result(result, error)

    def _send_result(self, result: Any, error: Exception | None) -> None:
        self.quiet_since = self.engine.world.now
        self.client.response(result, error)
        if self._tx is not None and self.idle_timeout_s and not self.half_sent:
            self._token += 1
            self.engine.world.after(self.idle_timeout_s, None, self._too_idle, self._token)

    def _too_idle(self, token: int) -> None:
        if token == self._token and self.alive and not self.half_sent:
            self.terminate()

    def send_notification(self, channel: str, payload: str, sender: Transaction) -> None:
        """Send a notification to the client."""
        if self.alive:
            self.client.notification(channel, int(sender.vxid.partition("/")[0]), payload)

    # ------------------------------------------------------------------- end

    def client_closed(self) -> None:
        """The client has closed; the current statement is executed to its end."""
        if not self.alive:
            return
        self._client_closed = True
        if self._statement is None:
            self._leave()

    def terminate(self) -> None:
        """Terminate at once (pg_terminate_backend), unless a commit is under way."""
        if not self.alive:
            return
        tx = self._own
        if tx is not None and tx.committing:
            self._client_closed = True
            self.client.closed()
            return
        if self._statement is not None:
            self._statement.close()
            self._statement = None
        self._leave()
        self.client.closed()

    def vanish(self) -> None:
        """The server has crashed."""
        self.alive = False
        if self._statement is not None:
            self._statement.close()
            self._statement = None
        self.engine.forget(self)
        self.client.closed()

    def _leave(self) -> None:
        self.alive = False
        for tx in (self._own, self._tx):
            if tx is not None:
                self.engine.abort(tx)
        self._own = self._tx = None
        self.engine.forget(self)
