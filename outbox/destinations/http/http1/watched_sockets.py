"""Which of many sockets have data that the event loop has not read yet: one system call for all.

It is asked before every request of a delivery run, about all connections of a pass of the event
loop.
"""

from __future__ import annotations

import select
import sys
from contextlib import suppress


class WatchedSockets:
    """Sockets by file descriptor, each with its owner.

    The event loop may close a socket before its owner learns of it, and another socket may get the
    descriptor meanwhile.
    """

    __slots__ = ("_owners", "_poll")

    def __init__(self) -> None:
        self._owners: dict[int, object] = {}
        if sys.platform == "linux":
            self._poll = select.epoll()
        else:
            self._poll = select.poll()

    def watch(self, fd: int, owner: object) -> None:
        """Watch the open socket of an owner, until `forget`."""
        if self._owners.get(fd) is not owner:
            # A closed socket is forgotten by epoll, and replaced by poll.
            self._poll.register(fd, select.POLLIN)
            self._owners[fd] = owner

    def forget(self, fd: int, owner: object) -> None:
        """Stop watching the socket of an owner, which may be closed."""
        if self._owners.get(fd) is owner:
            del self._owners[fd]
            with suppress(OSError):  # It is closed.
                self._poll.unregister(fd)

    def close(self) -> None:
        """Forget all sockets; none may be watched afterwards."""
        self._owners.clear()
        if sys.platform == "linux":
            self._poll.close()

    def readable(self) -> set[int]:
        """The sockets that have data, or EOF, now."""
        if not self._owners:
            return set()
        if sys.platform == "linux":
            # All of them: the default maximum is 1,023.
            found = self._poll.poll(0, len(self._owners))
        else:
            found = self._poll.poll(0)
        return {fd for fd, _ in found}
