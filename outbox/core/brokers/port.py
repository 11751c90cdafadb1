"""The port of destinations that keep what they get: brokers with streams.

A relay appends a lane's deliveries to a stream of the broker.  Two rules make that exact:

* **Compare and set.**  An append names the lane's last sequence in the stream.  The broker stores
  the messages only if the lane stands there, and stores a prefix of them: none that follows a
  message that it did not store.
* **A fence.**  An append names its owner.  Opening a lane writes the owner's epoch first; what a
  former owner sends later is refused, however late it arrives.

After a response that is lost, the stream may have the messages or not.  The lane is then opened
again, which gives its position, before anything more is sent or dead-lettered.

A broker that cannot do one of these things says so in its `Capabilities`, and promises less.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from outbox.core.model.response import Headers


APPEND_MAX = 500
"""Messages in one append."""


class Capabilities(NamedTuple):
    """What a broker can do for a lane."""

    compare: bool
    """It stores an append only if the lane stands where the append says."""
    prefix: bool
    """Whether the broker may store a prefix of an append of several messages."""
    fence: bool
    """It refuses the appends of former owners."""
    position: bool
    """It knows a lane's last sequence."""


class Owner(NamedTuple):
    """Who appends to the lanes of an endpoint."""

    identity: str
    """The database's identity; a copy of the database elsewhere has another one."""
    epoch: int
    """A number that increases each time the endpoint gets an owner."""
    opening: int = 0
    """A number that increases each time the owner opens the lane.  Its own requests without a
    response may be on their way as well: what it sent before it opened the lane again is refused,
    too."""


class Message(NamedTuple):
    """One delivery, as the stream keeps it."""

    sequence: int
    delivery: str
    """Its X-Delivery."""
    headers: Headers
    """Metadata, with X-Delivery, X-Lane and X-Sequence."""
    body: bytes
    key: bytes | None = None
    """The event's key, for brokers that keep one beside the body."""

    @property
    def size_bytes(self) -> int:
        """Size of body and headers."""
        return len(self.body) + sum(len(name) + len(value) for name, value in self.headers)


class StopKind(Enum):
    """Why an append stored less than it was given, or a lane could not be opened."""

    REFUSED = "refused"
    """The first message that is not stored never will be, such as one that is too large."""
    UNAVAILABLE = "unavailable"
    """The broker stores nothing now, whatever is sent: it is away, full or starting."""
    MISCONFIGURED = "misconfigured"
    """The broker stores nothing until a person acts: no right, no stream, a wrong password."""
    MOVED = "moved"
    """The lane does not stand where the append said, or the owner is fenced: open it."""
    CLOSED = "closed"
    """The server closed the idle connection while the append was on its way; a prefix of the
    messages may be stored: open the lane at once."""
    LOCAL = "local"
    """Nothing was sent: this process has no descriptors, ports, buffers or memory left."""
    UNKNOWN = "unknown"
    """The response was lost; a prefix of the messages may be stored: open the lane."""


class Stop(NamedTuple):
    """Why the broker did not do what it was asked."""

    kind: StopKind
    detail: str
    """One line, with the broker's own words."""


class Appended(NamedTuple):
    """The result of an append."""

    through: int
    """The last sequence that is stored for certain; if none is, the `after` of the append."""
    stop: Stop | None = None
    """Why the messages after it are not; None: all are stored."""
    receipt: str | None = None
    """What proves later that the broker had the messages, see `Position`."""


class Position(NamedTuple):
    """Where an opened lane stands: its fence is written."""

    sequence: int
    """The lane's last sequence in the stream; 0: none."""
    delivery: str | None
    """The X-Delivery of that message; None: the stream has trimmed it, or the sequence is 0."""


class Foreign(NamedTuple):
    """Another writer uses the lane's stream: what it holds is not of this relay."""

    detail: str


class Fenced(NamedTuple):
    """A later owner has the lane."""

    epoch: int
    """The later owner's epoch."""


Standing: TypeAlias = Position | Foreign | Fenced | Stop
"""The result of opening a lane."""
