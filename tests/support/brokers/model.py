"""A broker in memory that follows the port, and mutants that do not.

It has no clock and no network: a request is executed when its owner says so, perhaps long after
that owner has gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outbox.core.brokers.port import Appended, Fenced, Foreign, Position, Stop, StopKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox.core.brokers.port import Message, Owner, Standing

FULL = Stop(StopKind.UNAVAILABLE, "the stream is full")
TOO_LARGE = Stop(StopKind.REFUSED, "the message is too large")


@dataclass
class ModelBroker:
    """The stream of one lane."""

    entries: list[Message] = field(default_factory=list)
    trimmed: list[Message] = field(default_factory=list)
    """What retention has removed, before `entries`."""
    last_seq: int = 0
    """The last sequence that the stream ever had, also if it was trimmed."""
    owner: Owner | None = None
    """The fence."""
    is_foreign: bool = False
    """Another writer has appended."""
    refuses: Callable[[Message], bool] = lambda _: False
    """Messages that are never stored."""
    is_full: Callable[[], bool] = lambda: False
    """Whether it stores nothing now, asked for each message."""

    @property
    def stored(self) -> list[Message]:
        """All messages in order, also those that were trimmed."""
        return self.trimmed + self.entries

    def begin_open(self) -> None:
        """Called when the request to open the lane is sent, long before `open` perhaps."""

    def open(self, owner: Owner, *, force: bool = False) -> Standing:
        """Write the fence, and return the position."""
        if not force and (stands := self._check_owner(owner)) is not None:
            return stands
        if self.is_foreign:
            return Foreign("another writer")
        self._fence(owner)
        return self._position()

    def append(self, owner: Owner, after: int, messages: Sequence[Message]) -> Appended:
        """Store all of the messages, or a prefix of them."""
        if self._check_owner(owner) is not None or self.is_foreign:
            return Appended(after, Stop(StopKind.MOVED, "another owner"))
        if self._is_unopened(owner):
            return Appended(after, Stop(StopKind.MOVED, "the lane is not open"))
        if self._has_moved(after):
            return Appended(after, Stop(StopKind.MOVED, f"the stream stands at {self.last_seq}"))
        self._fence(owner)
        return self._store(after, messages)

    def _position(self) -> Position:
        newest = self.entries[-1] if self.entries else None
        if newest is None or newest.sequence != self.last_seq:
            return Position(self.last_seq, None)
        return Position(self.last_seq, newest.delivery)

    def _check_owner(self, owner: Owner) -> Standing | None:
        if self.owner is not None and self.owner.identity != owner.identity:
            return Foreign("another database")
        if self.owner is not None and self._is_later(self.owner, owner):
            return Fenced(self.owner.epoch)
        return None

    def _is_later(self, fence: Owner, owner: Owner) -> bool:
        return (fence.epoch, fence.opening) > (owner.epoch, owner.opening)

    def _fence(self, owner: Owner) -> None:
        self.owner = owner

    def _is_unopened(self, owner: Owner) -> bool:
        """Whether the owner's fence is not there: it was deleted, or replaced by a forced one."""
        return self.owner is None or self._is_later(owner, self.owner)

    def _has_moved(self, after: int) -> bool:
        return after != self.last_seq

    def _store(self, after: int, messages: Sequence[Message]) -> Appended:
        through = after
        for message in messages:
            if self.refuses(message):
                return Appended(through, TOO_LARGE)
            if self.is_full():
                return Appended(through, FULL)
            self._keep(message)
            through = message.sequence
        return Appended(through)

    def _keep(self, message: Message) -> None:
        self.entries.append(message)
        self.last_seq = message.sequence

    # ----------------------------------------------------------------- faults

    def delete(self) -> None:
        """Delete the stream and its fence."""
        self.entries.clear()
        self.trimmed.clear()
        self.last_seq = 0
        self.owner = None

    def trim(self) -> None:
        """Remove all messages, as retention does."""
        self.trimmed += self.entries
        self.entries.clear()

    def snapshot(self) -> ModelBroker:
        """A copy of its present state, fence included."""
        return replace(self, entries=list(self.entries), trimmed=list(self.trimmed))

    def put_back(self, older: ModelBroker) -> None:
        """Return to an older state, as a failover that loses writes does."""
        self.entries, self.trimmed = list(older.entries), list(older.trimmed)
        self.last_seq, self.owner = older.last_seq, older.owner


class WithoutEpochs(ModelBroker):
    """A mutant: the fence has no epoch."""

    def _check_owner(self, owner: Owner) -> Standing | None:
        return None


class WithoutOpenings(ModelBroker):
    """A mutant: the fence refuses former owners, but not late requests of the same one."""

    def _is_later(self, fence: Owner, owner: Owner) -> bool:
        return fence.epoch > owner.epoch


class WithoutCompare(ModelBroker):
    """A mutant: an append is not compared with the position, but copies are dropped."""

    def _is_unopened(self, owner: Owner) -> bool:
        return False

    def _has_moved(self, after: int) -> bool:
        return False

    def _keep(self, message: Message) -> None:
        if message.sequence > self.last_seq:
            super()._keep(message)


class Pipelined(ModelBroker):
    """A mutant: a message is stored although one before it was not."""

    def _store(self, after: int, messages: Sequence[Message]) -> Appended:
        through, stop = after, None
        for message in messages:
            if self.refuses(message) or self.is_full():
                stop = stop or (TOO_LARGE if self.refuses(message) else FULL)
                continue
            self._keep(message)
            through = message.sequence if stop is None else through
        return Appended(through, stop)


class ReadsFence(ModelBroker):
    """A mutant: opening a lane reads the fence of a former owner, and only an append writes it."""

    def open(self, owner: Owner, *, force: bool = False) -> Standing:
        kept = self.owner
        standing = super().open(owner, force=force)
        self.owner = self.owner if force else kept or self.owner
        return standing

    def _is_unopened(self, owner: Owner) -> bool:
        return self.owner is None


@dataclass
class ReadsBeforeFence(ModelBroker):
    """A mutant: opening a lane reads the position, and writes the fence only afterwards."""

    read: Position | None = None

    def begin_open(self) -> None:
        self.read = self._position()

    def open(self, owner: Owner, *, force: bool = False) -> Standing:
        standing = super().open(owner, force=force)
        return self.read if isinstance(standing, Position) and self.read else standing


class KeepsFence(ModelBroker):
    """A mutant: a forced opening reads the position, and leaves the fence as it is."""

    def _fence(self, owner: Owner) -> None:
        if self.owner is None or self._check_owner(owner) is None:
            super()._fence(owner)
