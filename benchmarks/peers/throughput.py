"""Deliveries per second: each contestant works off a backlog that was written before it started.

All POST to one receiver, 64 at a time, and the receiver measures the time (see counting). The relay
sends over the 64 lanes of one endpoint, each in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.deliveries import BACKLOG, FRAME_BYTES
from benchmarks.figures import Target
from benchmarks.peers.contestants import PAYLOAD_BYTES, ready
from benchmarks.peers.counting import counter
from benchmarks.peers.turns import Turns, unless_ended
from benchmarks.stage import add_endpoint, child, search

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.figures import Row
    from benchmarks.peers.contestants import Contestant
    from benchmarks.peers.counting import Counter
    from benchmarks.stage import Stage

MANY = 64
DELIVERIES = {1: 10_000, MANY: 100_000}
"""By the concurrency of the relay and of the bare client; enough that half a second of start-up is
negligible."""
OURS = {1: "outbox, 1 lane", MANY: "outbox, 64 lanes"}
BARE = {1: "bare aiohttp client, one at a time", MANY: "bare aiohttp client, 64 at a time"}
OWN_CLIENT = {
    1: "bare loop on the relay's transport, one at a time",
    MANY: "bare loops on the relay's transport, 64 at a time",
}
TARGETS = {1: None, MANY: Target("at least", 1.4)}
OWN_CLIENT_TARGETS = {1: Target("at least", 0.65), MANY: None}


async def run(
    stage: Stage, rounds: int, contestants: Sequence[Contestant], share: float
) -> list[Row]:
    """Run all contestants alternately, round by round, with a share of the backlogs."""
    turns = Turns(stage, "peers", "/s")
    found = turns.found
    async with counter(stage) as counting:
        for number in range(rounds):
            for at_a_time, deliveries in DELIVERIES.items():
                jobs = int(deliveries * share)
                found.add(OURS[at_a_time], await relay(stage, counting, at_a_time, jobs))
                found.add(BARE[at_a_time], await bare(counting, at_a_time, jobs, "aiohttp"))
                found.add(OWN_CLIENT[at_a_time], await bare(counting, at_a_time, jobs, "outbox"))
            for each in turns.remaining(contestants):
                with turns.turn(each):
                    found.add(each.name, await peer(stage, counting, each, int(each.jobs * share)))
            turns.print_round(number, rounds)

    def row(at_a_time: int, name: str, target: Target | None) -> Row:
        ours = OURS[at_a_time]
        return turns.row(ours.removeprefix("outbox, "), ours, name, name, target)

    return [
        *(
            row(at_a_time, name, OWN_CLIENT_TARGETS[at_a_time])
            for at_a_time, name in OWN_CLIENT.items()
        ),
        *(row(at_a_time, name, TARGETS[at_a_time]) for at_a_time, name in BARE.items()),
        *(row(MANY, each.name, each.target) for each in contestants),
    ]


async def relay(stage: Stage, counting: Counter, lanes: int, deliveries: int) -> float:
    """Return the relay's deliveries per second."""
    async with stage.server.database() as database:
        async with search(database) as connection:
            await add_endpoint(connection, counting.url, lanes=lanes)
            await connection.execute(BACKLOG, deliveries, PAYLOAD_BYTES - FRAME_BYTES)
        counting.expect(deliveries)
        async with stage.relay(database, owns=False) as process:
            assert process.process is not None
            return await unless_ended("the relay", counting.per_s(), process.process.wait())


async def bare(counting: Counter, at_a_time: int, requests: int, transport: str) -> float:
    """Return the bare client's requests per second."""
    counting.expect(requests)
    async with child(
        "client",
        counting.url,
        "--quick-loop",
        *("--transport", transport),
        *("--requests", requests),
        *("--concurrency", at_a_time),
        *("--payload-bytes", PAYLOAD_BYTES),
    ) as process:
        return await unless_ended("the bare client", counting.per_s(), process.ended())


async def peer(stage: Stage, counting: Counter, contestant: Contestant, jobs: int) -> float:
    """Return a contestant's deliveries per second.

    Raises:
        CannotRun: It is unavailable, it ended, or it did not finish.
    """
    async with (
        stage.server.database(migrated=False) as database,
        ready(contestant, database, counting.url, jobs=jobs, mode=contestant.draining) as working,
    ):
        counting.expect(jobs)
        working.begin()
        return await unless_ended(contestant.title, counting.per_s(), working.process.ended())
