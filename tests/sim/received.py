"""What receivers have seen, which no restore of the database undoes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from tests.sim.books import Violation

if TYPE_CHECKING:
    from uuid import UUID

    from tests.sim.books import Attempt, Sent
    from tests.sim.clockwork import World
    from tests.sim.database.tables import Database

    Identity = tuple[str, str]
    """X-Delivery and event id."""


class Received:
    """Checks that numbers keep their events, and the order of what receivers process."""

    def __init__(self, world: World, database: Database) -> None:
        self._world = world
        self._database = database
        self.by_endpoint: dict[UUID, dict[str, float]] = defaultdict(dict)
        """When each X-Delivery was processed."""
        self.duplicates = 0
        # By the names of all lanes that ever existed, by sequence number.
        self._numbers: dict[str, dict[int, Identity]] = defaultdict(dict)
        # Contents of each batch, by endpoint and X-Delivery.
        self._batches: dict[tuple[UUID, str], tuple[tuple[str, int, str], ...]] = {}
        self._versions: dict[tuple[UUID, str], int] = defaultdict(int)
        # Events that a restore has undone.
        self._undone: set[str] = set()

    def numbers(self, lane: str) -> dict[int, Identity]:
        """What was sent under each sequence number of a lane."""
        return self._numbers[lane]

    def is_current(self, sent: Sent | Attempt) -> bool:
        """Whether its relay has registered since the database was last restored.

        Another one may not know yet that the database has lost its lease.
        """
        return sent.restores == self._database.restores

    def restored(self, events: set[str]) -> None:
        """The database was restored.

        Args:
            events: the ids of all events before.
        """
        self._undone |= events - {str(event.event_id) for event in self._database.outbox.values()}
        # Versions are counted again, and dead letters may be pending again.
        self._versions.clear()

    def check_headers(self, sent: Sent, headers: dict[str, str]) -> None:
        """Compare the headers of a request with its body, and a batch with what it was.

        Raises:
            Violation: they differ.
        """
        in_headers = [headers["x-lane"], headers["x-sequence"], headers["x-previous-sequence"]]
        in_body = [sent.first.lane, str(sent.first.seq), str(sent.first.previous)]
        if sent.is_array:
            in_headers += [headers["x-last-sequence"]]
            in_body += [str(sent.last.seq)]
            # A receiver may drop a whole request by its id.
            what = tuple((each.lane, each.seq, each.delivery) for each in sent.attempts)
            key = sent.endpoint_id, headers["x-delivery"]
            known = self._batches.setdefault(key, what)
            if known != what and (len(what) > 1 or known[0][2] != what[0][2]):
                raise Violation("numbers", f"batch {key[1]} was {known}, and is {what}")
        if in_headers != in_body or headers["webhook-id"] != headers["x-delivery"]:
            raise Violation("numbers", f"the headers say {in_headers}, the body {in_body}")

    def check_numbers(self, sent: Sent) -> None:
        """Check that no sequence number of a lane had another event before.

        Raises:
            Violation: one had.
        """
        for each in sent.attempts:
            identity = each.delivery, each.event_id
            known = self._numbers[each.lane].setdefault(each.seq, identity)
            if known != identity:
                raise Violation("numbers", f"{each.lane}/{each.seq} was {known}, and is {identity}")

    def processed(self, attempt: Attempt) -> None:
        """The receiver processed a delivery.

        Raises:
            Violation: it was never committed, or comes after a later one.
        """
        seen = self.by_endpoint[attempt.endpoint_id]
        if attempt.delivery in seen:
            self.duplicates += 1
            attempt.again = True
            return
        seen[attempt.delivery] = self._world.now
        if attempt.event_id in self._undone or not self.is_current(attempt):
            return
        event = self._database.outbox.get(attempt.outbox_number)
        if event is None or str(event.event_id) != attempt.event_id:
            raise Violation("phantom", f"{attempt.event_id} was never committed")
        if attempt.key is not None and not attempt.is_replay:
            at = (attempt.endpoint_id, attempt.key)
            if attempt.version <= self._versions[at]:
                raise Violation(
                    "order",
                    f"{attempt.lane}/{attempt.seq}: {attempt.key} v{attempt.version} after "
                    f"v{self._versions[at]}",
                )
            self._versions[at] = attempt.version
