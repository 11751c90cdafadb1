"""What the suite needs of a destination: its streams, and links to it that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from outbox.destination import Message, Owner, Position, StopKind, Unresolved
from outbox_devtools.waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from outbox.destination import Broker, BrokerAddress, Destination, Server

PATIENT_S = 10.0
OWNER = Owner("7300000000000000000/16384", 1, 1)
IN_DOUBT = (StopKind.UNKNOWN, StopKind.CLOSED)
"""After the loss of a response, the lane is opened: at once, if the connection was idle before."""


def message(lane: str, sequence: int, size: int = 10) -> Message:
    """The delivery of a sequence of a lane."""
    delivery = f"d{sequence}"
    headers = (("X-Delivery", delivery), ("X-Lane", lane), ("X-Sequence", str(sequence)))
    return Message(sequence, delivery, headers, b"x" * size)


async def open_lane(broker: Broker, lane: str, owner: Owner, after: int = 0) -> Position:
    """Open a lane. On a slow machine, a short time-out may end before the first response."""

    async def attempt() -> Position | None:
        standing = await broker.open(lane, owner, after, None)
        return standing if isinstance(standing, Position) else None

    position = await until(attempt, what="the lane to be opened")
    assert position is not None
    return position


class Link(Protocol):
    """A driver, and the way of its bytes to the broker."""

    @property
    def broker(self) -> Broker: ...
    def lose_responses(self) -> None:
        """Until `heal`."""
        ...

    def hold_requests(self) -> None:
        """Until `release`; their senders may have gone by then."""
        ...

    async def held(self) -> None:
        """Wait for a request that is held."""
        ...

    async def release(self) -> None:
        """Let the held requests through, and wait until the broker has executed them."""
        ...

    def heal(self) -> None: ...


class Stored(NamedTuple):
    """A message of a stream."""

    sequence: int
    delivery: str


class ServedRig(Protocol):
    """What the cases about egress need."""

    @property
    def destination(self) -> Destination:
        """What is tested."""
        ...

    @property
    def lanes(self) -> Sequence[str]:
        """At least three."""
        ...

    def address(self, server: Server | None = None) -> BrokerAddress:
        """The address of the rig's streams, with its server as an IP address.

        Args:
            server: a server in place of the rig's; nothing there speaks the broker's protocol.
        """
        ...


class Rig(ServedRig, Protocol):
    """A broker with empty streams of some lanes."""

    @property
    def too_large(self) -> int:
        """Size of a body that the broker refuses."""
        ...

    @property
    def can_trim(self) -> bool: ...
    def link(self, timeout_s: float = PATIENT_S) -> AbstractAsyncContextManager[Link]: ...
    def absent(self) -> AbstractAsyncContextManager[Broker]:
        """A driver whose broker cannot be reached."""
        ...

    async def stored(self, lane: str) -> list[Stored]: ...
    async def forget(self, lane: str) -> None:
        """Delete a lane's stream, as an operator does; a restored backup may lack it, too."""
        ...

    async def trim(self, lane: str) -> None:
        """Remove the messages of a lane, as retention does."""
        ...

    async def write_as_another(self, lane: str) -> None:
        """Append a message that is not the relay's."""
        ...


class FixedResolver:
    """A resolver of the names of a test, of localhost by default; addresses need none."""

    def __init__(self, addresses: Mapping[str, Sequence[str]] | None = None) -> None:
        self._addresses = addresses or {"localhost": ["127.0.0.1"]}

    async def resolve(self, host: str) -> Sequence[str]:
        if host not in self._addresses:
            raise Unresolved("no address in this test")
        return self._addresses[host]

    def current(self, host: str) -> Sequence[str] | None:
        return self._addresses.get(host)

    async def aclose(self) -> None:
        """It has nothing to close."""
