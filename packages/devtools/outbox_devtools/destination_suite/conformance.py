"""Tests that every destination must pass; a subclass defines its rig.

What a broker's capabilities exclude is asserted as well: that the promise does not hold there, so
that a driver never says less than it could.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from outbox.destination import Appended, Fenced, Foreign, Owner, Position, Stop, StopKind
from outbox_devtools.destination_suite.egress import EgressConformance
from outbox_devtools.destination_suite.rig import IN_DOUBT, OWNER, Stored, message, open_lane
from outbox_devtools.waiting import ends_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.destination import Message, Standing
    from outbox_devtools.destination_suite.rig import Link, Rig

REOPENED = OWNER._replace(opening=2)
"""The owner opens the lane again."""
LATER_OWNER = Owner(OWNER.identity, 2, 1)
ELSEWHERE = Owner("7300000000000000001/16384", 9, 1)
"""A copy of the database has another identity."""
LAST_OPENING = 9
SHORT_S = 0.5


def messages(lane: str, *sequences: int) -> list[Message]:
    return [message(lane, sequence) for sequence in sequences]


def stored(*sequences: int) -> list[Stored]:
    return [Stored(sequence, f"d{sequence}") for sequence in sequences]


def kind_of(result: Standing | Appended) -> StopKind | None:
    stop = result.stop if isinstance(result, Appended) else result
    return stop.kind if isinstance(stop, Stop) else None


class BrokerConformance(EgressConformance):
    """Inherit from this class and provide the fixture `rig`."""

    @pytest.fixture
    def rig(self) -> Rig:
        raise NotImplementedError

    # -------------------------------------------------- positions and order

    async def test_the_last_message_is_the_position(self, rig: Rig) -> None:
        lane = rig.lanes[0]
        async with rig.link() as link:
            assert await link.broker.open(lane, OWNER, 0, None) == Position(0, None)
            appended = await link.broker.append(lane, OWNER, 0, messages(lane, 1, 2, 3))
            assert appended == Appended(3, None, appended.receipt)
            opened = await link.broker.open(lane, REOPENED, 3, appended.receipt)
            assert opened == Position(3, "d3")
        async with rig.link() as link:
            # Another process, which has the receipt or has lost it.
            for owner, receipt in (
                (LATER_OWNER, appended.receipt),
                (LATER_OWNER._replace(opening=2), None),
            ):
                opened = await link.broker.open(lane, owner, 3, receipt)
                assert opened == Position(3, "d3")
        assert await rig.stored(lane) == stored(1, 2, 3)

    async def test_a_dead_letter_is_a_hole_and_no_loss(self, rig: Rig) -> None:
        lane = rig.lanes[0]
        async with rig.link() as link:
            await link.broker.open(lane, OWNER, 0, None)
            assert (await link.broker.append(lane, OWNER, 0, messages(lane, 1, 2))).stop is None
            # 3 is a dead letter, and so is 5, in the middle of an append.
            assert (await link.broker.append(lane, OWNER, 2, messages(lane, 4, 6))).stop is None
            # The last sequences of the lane are dead letters: the position is below them.
            assert await link.broker.open(lane, REOPENED, 6, None) == Position(6, "d6")
        assert await rig.stored(lane) == stored(1, 2, 4, 6)

    async def test_an_append_from_a_former_position(self, rig: Rig) -> None:
        lane = rig.lanes[0]
        async with rig.link() as stale, rig.link() as link:
            await stale.broker.open(lane, OWNER, 0, None)
            await link.broker.open(lane, OWNER, 0, None)
            await link.broker.append(lane, OWNER, 0, messages(lane, 1, 2))
            late = await stale.broker.append(lane, OWNER, 0, messages(lane, 1, 2, 3))
            compares = link.broker.capabilities.compare
        assert (kind_of(late) is StopKind.MOVED) == compares
        if compares:
            assert late.through == 0
            assert await rig.stored(lane) == stored(1, 2)

    async def test_lanes_do_not_disturb_each_other(self, rig: Rig) -> None:
        async with rig.link() as link:
            for round_ in range(5):
                at = round_ * 2

                async def deliver(lane: str, at: int = at) -> Appended:
                    owner = OWNER._replace(opening=at + 1)
                    opened = await link.broker.open(lane, owner, at, None)
                    assert opened == Position(at, f"d{at}" if at else None)
                    return await link.broker.append(lane, owner, at, messages(lane, at + 1, at + 2))

                for appended in await asyncio.gather(*map(deliver, rig.lanes)):
                    assert appended.through == at + 2
        for lane in rig.lanes:
            assert await rig.stored(lane) == stored(*range(1, 11))

    # -------------------------------------------------------- lost responses

    async def test_a_lost_response_is_settled_by_the_position(self, rig: Rig) -> None:
        lane = rig.lanes[0]
        async with rig.link(2 * SHORT_S) as link:
            await link.broker.open(lane, OWNER, 0, None)
            await link.broker.append(lane, OWNER, 0, messages(lane, 1))
            link.lose_responses()
            lost = await link.broker.append(lane, OWNER, 1, messages(lane, 2, 3))
            link.heal()
            assert kind_of(lost) in IN_DOUBT
            assert lost.through == 1
            opened = await reopened(link, lane, 1)
            # The first of them is stored, which the broker has confirmed; perhaps all are.
            assert opened in (Position(2, "d2"), Position(3, "d3")), opened
            again = OWNER._replace(opening=LAST_OPENING)
            assert await link.broker.open(lane, again, opened.sequence, None) == opened
        assert await rig.stored(lane) == stored(*range(1, opened.sequence + 1))

    async def test_a_silent_broker_ends_a_call_in_time(self, rig: Rig) -> None:
        lane, loop = rig.lanes[0], asyncio.get_running_loop()
        async with rig.link(SHORT_S) as link:
            await open_lane(link.broker, lane, OWNER)
            link.hold_requests()
            began_at = loop.time()
            call = asyncio.create_task(link.broker.append(lane, OWNER, 0, messages(lane, 1)))
            assert await ends_by(call, began_at + 1.8 * SHORT_S)
            elapsed_s, appended = loop.time() - began_at, await call
            await link.release()
        assert kind_of(appended) is StopKind.UNKNOWN
        assert appended.through == 0
        assert elapsed_s > SHORT_S * 0.9

    @pytest.mark.parametrize("is_dead_lettered", [True, False])
    async def test_what_a_former_owner_sent_arrives_late(
        self, rig: Rig, is_dead_lettered: bool
    ) -> None:
        lane = rig.lanes[0]
        async with rig.link(SHORT_S) as former, rig.link() as link:
            await link.broker.open(lane, OWNER, 0, None)
            await link.broker.append(lane, OWNER, 0, messages(lane, 1))
            assert await open_lane(former.broker, lane, REOPENED, 1) == Position(1, "d1")
            former.hold_requests()
            await former.broker.append(lane, REOPENED, 1, messages(lane, 2, 3))
            assert await link.broker.open(lane, LATER_OWNER, 1, None) == Position(1, "d1")
            if is_dead_lettered:
                # 2 is a dead letter.
                assert (
                    await link.broker.append(lane, LATER_OWNER, 1, messages(lane, 3))
                ).stop is None
            await former.release()
            if link.broker.capabilities.fence:
                assert await rig.stored(lane) == stored(1, *([3] if is_dead_lettered else []))

    async def test_what_an_owner_sent_before_it_opened_the_lane_again_arrives_late(
        self, rig: Rig
    ) -> None:
        lane = rig.lanes[0]
        async with rig.link(SHORT_S) as former, rig.link() as link:
            await open_lane(former.broker, lane, OWNER)
            former.hold_requests()
            await former.broker.append(lane, OWNER, 0, messages(lane, 1, 2))
            assert await link.broker.open(lane, REOPENED, 0, None) == Position(0, None)
            await former.release()
            if link.broker.capabilities.fence:
                assert await rig.stored(lane) == []
                # 1 is a dead letter.
                assert (await link.broker.append(lane, REOPENED, 0, messages(lane, 2))).stop is None
                assert await rig.stored(lane) == stored(2)

    async def test_a_former_owner_cannot_open_a_lane(self, rig: Rig) -> None:
        lane = rig.lanes[0]
        async with rig.link() as former, rig.link() as link:
            await former.broker.open(lane, OWNER, 0, None)
            await link.broker.open(lane, LATER_OWNER, 0, None)
            opened = await former.broker.open(lane, REOPENED, 0, None)
            assert isinstance(opened, Fenced) == link.broker.capabilities.fence
            if isinstance(opened, Fenced):
                assert opened.epoch == LATER_OWNER.epoch
                appended = await former.broker.append(lane, REOPENED, 0, messages(lane, 1))
                assert kind_of(appended) is StopKind.MOVED
                assert await rig.stored(lane) == []

    async def test_a_cancelled_append_leaves_a_position(self, rig: Rig) -> None:
        lane = rig.lanes[0]
        async with rig.link(SHORT_S * 4) as link:
            await link.broker.open(lane, OWNER, 0, None)
            link.hold_requests()
            cancelled = asyncio.create_task(
                link.broker.append(lane, OWNER, 0, messages(lane, 1, 2))
            )
            await link.held()
            cancelled.cancel()
            with suppress(asyncio.CancelledError):
                await cancelled
            await link.release()
            opened = await reopened(link, lane, 0)
            assert opened in (Position(0, None), Position(1, "d1"), Position(2, "d2")), opened
            assert await rig.stored(lane) == stored(*range(1, opened.sequence + 1))

    # ------------------------------------------------- what happens to streams

    async def test_a_stream_that_was_lost_is_noticed_by_its_owner(self, rig: Rig) -> None:
        lane = rig.lanes[0]
        async with rig.link() as link:
            await link.broker.open(lane, OWNER, 0, None)
            receipt = (await link.broker.append(lane, OWNER, 0, messages(lane, 1, 2))).receipt
            await rig.forget(lane)
            appended = await link.broker.append(lane, OWNER, 2, messages(lane, 3))
            assert appended.through == 2
            assert appended.stop is not None
            opened = await link.broker.open(lane, REOPENED, 2, receipt)
        assert not isinstance(opened, Position) or opened.sequence < 2
        assert await rig.stored(lane) == []

    async def test_a_trimmed_stream_has_lost_nothing(self, rig: Rig) -> None:
        if not rig.can_trim:
            pytest.skip("it trims in its own time, see its own tests")
        lane = rig.lanes[0]
        async with rig.link() as link:
            await link.broker.open(lane, OWNER, 0, None)
            receipt = (await link.broker.append(lane, OWNER, 0, messages(lane, 1, 2))).receipt
            await rig.trim(lane)
        async with rig.link() as link:
            opened = await link.broker.open(lane, LATER_OWNER, 2, receipt)
            assert isinstance(opened, Position)
            assert opened.sequence == 2
            appended = await link.broker.append(lane, LATER_OWNER, 2, messages(lane, 3))
            assert appended == Appended(3, None, appended.receipt)
        assert (await rig.stored(lane))[-1:] == stored(3)

    async def test_another_writer_is_noticed(self, rig: Rig) -> None:
        lane = rig.lanes[0]
        async with rig.link() as link:
            await link.broker.open(lane, OWNER, 0, None)
            receipt = (await link.broker.append(lane, OWNER, 0, messages(lane, 1))).receipt
            await rig.write_as_another(lane)
            opened = await link.broker.open(lane, REOPENED, 1, receipt)
        assert isinstance(opened, Foreign)

    async def test_a_copy_of_the_database_does_not_write_here(self, rig: Rig) -> None:
        lane = rig.lanes[0]
        async with rig.link() as link, rig.link() as copy:
            await link.broker.open(lane, OWNER, 0, None)
            await link.broker.append(lane, OWNER, 0, messages(lane, 1))
            opened = await copy.broker.open(lane, ELSEWHERE, 1, None)
            assert isinstance(opened, Foreign)
            assert (await link.broker.append(lane, OWNER, 1, messages(lane, 2))).stop is None
        assert await rig.stored(lane) == stored(1, 2)

    @pytest.mark.parametrize("former", [ELSEWHERE, LATER_OWNER], ids=["elsewhere", "later"])
    async def test_a_forced_opening_takes_the_fence(self, rig: Rig, former: Owner) -> None:
        """An operator has decided which of two owners goes on."""
        lane = rig.lanes[0]
        async with rig.link() as other, rig.link() as link:
            await other.broker.open(lane, former, 0, None)
            assert (await other.broker.append(lane, former, 0, messages(lane, 1, 2))).stop is None
            opened = await link.broker.open(lane, OWNER, 0, None)
            is_fenced = link.broker.capabilities.fence or former is ELSEWHERE
            assert isinstance(opened, Fenced | Foreign) == is_fenced
            assert await link.broker.open(lane, REOPENED, 0, None, force=True) == Position(2, "d2")
            if link.broker.capabilities.fence:
                late = await other.broker.append(lane, former, 2, messages(lane, 3, 4))
                assert kind_of(late) is StopKind.MOVED
            assert (await link.broker.append(lane, REOPENED, 2, messages(lane, 3))).stop is None
            third = REOPENED._replace(opening=3)
            assert await link.broker.open(lane, third, 3, None) == Position(3, "d3")
        assert await rig.stored(lane) == stored(1, 2, 3)

    async def test_a_forced_opening_is_no_cure_for_messages_of_another_writer(
        self, rig: Rig
    ) -> None:
        lane = rig.lanes[0]
        async with rig.link() as link:
            await link.broker.open(lane, OWNER, 0, None)
            receipt = (await link.broker.append(lane, OWNER, 0, messages(lane, 1))).receipt
            await rig.write_as_another(lane)
            opened = await link.broker.open(lane, REOPENED, 1, receipt, force=True)
        assert isinstance(opened, Foreign)

    # ------------------------------------------------------------- refusals

    @pytest.mark.parametrize("place", [0, 1, 2])
    async def test_a_message_that_is_too_large_is_refused_after_its_prefix(
        self, rig: Rig, place: int
    ) -> None:
        lane = rig.lanes[0]
        given = messages(lane, 1, 2, 3)
        given[place] = message(lane, place + 1, rig.too_large)
        async with rig.link() as link:
            await link.broker.open(lane, OWNER, 0, None)
            at, opening = 0, OWNER
            # All or nothing, or the messages before it: both are prefixes.
            for _ in range(place + 1):
                appended = await link.broker.append(lane, opening, at, given[at:])
                assert appended.stop is not None
                assert at <= appended.through <= place
                at = appended.through
                if kind_of(appended) is StopKind.REFUSED and at == place:
                    break
                # As the relay does: the first one alone, and the lane opened where it moved.
                if kind_of(appended) is not StopKind.REFUSED:
                    opening = opening._replace(opening=opening.opening + 1)
                    await link.broker.open(lane, opening, at, None)
                alone = await link.broker.append(lane, opening, at, given[at : at + 1])
                at = alone.through
            assert kind_of(appended) is StopKind.REFUSED
            assert await rig.stored(lane) == stored(*range(1, place + 1))
            rest = [message(lane, each.sequence) for each in given[place + 1 :]]
            if rest:
                assert (await link.broker.append(lane, opening, place, rest)).stop is None
        assert await rig.stored(lane) == stored(*(n for n in (1, 2, 3) if n != place + 1))

    async def test_a_broker_that_is_away_is_no_failure_of_a_delivery(self, rig: Rig) -> None:
        lane = rig.lanes[0]
        async with rig.absent() as broker:
            opened = await broker.open(lane, OWNER, 0, None)
            assert kind_of(opened) is StopKind.UNAVAILABLE
            appended = await broker.append(lane, OWNER, 0, messages(lane, 1))
            assert appended.through == 0
            assert kind_of(appended) in (StopKind.UNAVAILABLE, StopKind.MOVED)

    async def test_closing_ends_the_calls_in_flight(self, rig: Rig) -> None:
        lane = rig.lanes[0]
        async with rig.link() as link:
            await link.broker.open(lane, OWNER, 0, None)
            link.hold_requests()
            appending = asyncio.create_task(link.broker.append(lane, OWNER, 0, messages(lane, 1)))
            await link.held()
            async with asyncio.timeout(20):
                await link.broker.aclose()
                assert kind_of(await appending) is StopKind.UNKNOWN
            assert isinstance(await link.broker.open(lane, REOPENED, 0, None), Stop)

    async def test_the_check_of_a_usable_broker_has_no_errors_and_writes_nothing(
        self, rig: Rig
    ) -> None:
        async with rig.link() as link:
            findings = await link.broker.check(rig.lanes)
        assert [each for each in findings if each.is_error] == []
        for lane in rig.lanes:
            assert await rig.stored(lane) == []


async def reopened(link: Link, lane: str, after: int) -> Position:
    """Open a lane again, while that is in doubt as well."""
    opened: Sequence[Standing] = []
    for opening in range(2, LAST_OPENING):
        opened = [await link.broker.open(lane, OWNER._replace(opening=opening), after, None)]
        if isinstance(opened[0], Position):
            return opened[0]
    raise AssertionError(f"the lane cannot be opened: {opened}")
