"""Random walks: find violations that need many steps sooner than Hypothesis does.

Every run has a seed, which a violation carries as a note.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from outbox.core.delivery.circuit_breaker import CircuitBreaker
from outbox.core.delivery.commands import Gate
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.lane_generations import LaneGenerations
from outbox.core.model.response_policy import AttemptOutcome
from outbox.core.sequencing.gaps import GapTracker
from tests.core import cursor_model, generations_model, lane_model
from tests.core.circuit_breaker_model import Endpoint
from tests.core.cursor_model import Cursor
from tests.core.database_model import Database
from tests.core.invariants import Violation
from tests.core.lane_model import World

if TYPE_CHECKING:
    from collections.abc import Callable

STATUSES = (200, 200, 200, 503, 503, 400, 409, None)


def _walk_cursor(cursor: Cursor, rng: random.Random, steps: int) -> None:
    """Execute random steps, with different weights in each run."""
    database, below = cursor.database, rng.randrange
    happenings: list[tuple[float, Callable[[], None]]] = [
        (20, lambda: cursor.advance(below(16))),
        (3, cursor.whole_batch),
        (2, lambda: cursor.tick(below(20))),
        (0.3, lambda: cursor.lose_batch(applied=bool(below(2)))),
        (0.3, lambda: cursor.crash(below(3), hidden=bool(below(2)), applied=bool(below(2)))),
        (6, lambda: database.publish(below(2))),
        (4, lambda: database.start(below(2), 1 + below(2))),
        (4, lambda: database.finish(below(8))),
        (1, database.begin),
        (2, lambda: database.insert(below(8), below(2))),
        (3, lambda: database.allocate(below(8), 1 + below(2))),
        (0.5, lambda: database.savepoint(below(8))),
        (0.5, lambda: database.rollback_to_savepoint(below(8))),
        (1, lambda: database.prepare(below(8))),
        (2, lambda: database.commit(below(8))),
        (2, lambda: database.release(below(8))),
        (1, lambda: database.rollback(below(8))),
        (0.1, lambda: database.skip_ids(below(40))),
    ]
    weights = [weight * rng.choice((0.1, 0.5, 1, 2)) for weight, _ in happenings]
    for _, happens in rng.choices(happenings, weights, k=steps):
        happens()
    cursor.expect_everything_ends(below(64))


def hunt_cursor(
    runs: int,
    tracker: Callable[[], GapTracker] = GapTracker,
    faults: cursor_model.Faults = cursor_model.NO_FAULTS,
    first_seed: int = 0,
) -> None:
    """Walk `runs` times, each time with another seed."""
    for seed in range(first_seed, first_seed + runs):
        rng = random.Random(seed)
        database = Database(
            transactions_max=rng.randint(2, 5),
            keys=rng.randint(1, 2),
            prepare_renames=rng.random() < 0.3,
        )
        cursor = Cursor(
            database,
            tracker,
            faults,
            limit_max=rng.choice((1, 2, 5)),
            gaps_max=rng.choice((1, 2, 1000)),
        )
        try:
            _walk_cursor(cursor, rng, 300)
        except Violation as violation:
            violation.add_note(f"seed {seed}")
            raise


def _walk_lane(world: World, rng: random.Random, steps: int) -> None:
    """Execute random steps, with different weights in each run."""
    below, chance = rng.randrange, lambda: rng.random() < 0.5
    blocks, ends = rng.random() < 0.2, rng.random() < 0.3
    together = rng.choice(((None,), (None, 1, 3, 50), (3, 50)))
    happenings: list[tuple[float, Callable[[], object]]] = [
        (2, lambda: world.offer(1 + below(4), given=chance())),
        (0.5, lambda: world.offer(1 + below(20), announced=chance(), given=chance())),
        (0.5, lambda: world.offer(2, expires_in_s=5 * rng.random())),
        (0.3, lambda: world.erase(below(4))),
        (0.3, world.reread),
        (0.5, world.release),
        (16, world.proceed),
        (4, lambda: world.proceed(rng.choice((Gate.PROBE, Gate.PROBE, Gate.SHUT)))),
        (6, lambda: world.fetched(1 + below(12))),
        (
            15,
            lambda: world.response(
                rng.choice(STATUSES),
                received=chance(),
                u=rng.random(),
                after_s=rng.random(),
                blocks=blocks,
                part=rng.choice((None, None, below(8))),
            ),
        ),
        (8, lambda: world.follow(rng.random())),
        (4, world.peek),
        (0.3, lambda: world.batch_up_to(rng.choice(together))),
        (0.5, world.unsent),
        (8, lambda: world.write_group(1 + below(4))),
        (1, world.checkpoint),
        (3, lambda: world.tick(rng.choice((0.1, 1, 5, 30)))),
        (0.3, lambda: world.cut(below(20))),
        (0.5, world.unblock),
        (0.5, world.skip),
        (1, world.notice_skip),
        (0.2 if ends else 0, world.end),
        (1, lambda: world.crash(below(4), received=chance(), skew_s=rng.choice((0, 0, -2, 2)))),
        (1, lambda: world.deliver_late_copy(below(4))),
        (0.2, world.stop),
        (1, world.hand_over),
    ]
    weights = [weight * rng.choice((0.1, 0.5, 1, 2)) for weight, _ in happenings]
    for _, happens in rng.choices(happenings, weights, k=steps):
        happens()
    world.expect_everything_ends()


def hunt_lane(
    runs: int,
    lane: type[Lane] = Lane,
    faults: lane_model.Faults = lane_model.NO_FAULTS,
    first_seed: int = 0,
) -> None:
    """Walk `runs` times, each time with another seed."""
    for seed in range(first_seed, first_seed + runs):
        try:
            _walk_lane(World(lane, faults), random.Random(seed), 300)
        except Violation as violation:
            violation.add_note(f"seed {seed}")
            raise


def _walk_circuit_breaker(endpoint: Endpoint, rng: random.Random, steps: int) -> None:
    """Execute random steps; the receiver's behaviour persists for some steps."""
    below = rng.randrange
    moods = (
        AttemptOutcome.DELIVERED,
        AttemptOutcome.DELIVERED,
        AttemptOutcome.RETRY,
        AttemptOutcome.REFUSED,
    )
    mood, steady = rng.choice(moods), rng.choice((0.7, 0.95, 1.0))

    def turn() -> None:
        nonlocal mood
        mood = rng.choice(moods)

    def response() -> None:
        outcome = mood if rng.random() < steady else rng.choice(moods)
        endpoint.response(below(8), outcome, rng.random())

    happenings: list[tuple[float, Callable[[], object]]] = [
        (2, lambda: endpoint.offer(below(8), 1 + below(5))),
        (0.5, lambda: endpoint.expire_pending(below(8))),
        (20, lambda: endpoint.work(below(8))),
        (12, response),
        (1, turn),
        (
            0.3,
            lambda: endpoint.response(below(8), AttemptOutcome.RETRY, rng.random(), 1 + below(100)),
        ),
        (0.1, lambda: endpoint.response(below(8), AttemptOutcome.REFUSED, gone=True)),
        (2, lambda: endpoint.tick(rng.choice((0.1, 1, 5)), late=rng.random() < 0.5)),
        (3, endpoint.jump),
        (0.2, endpoint.pause),
        (0.4, endpoint.resume),
        (0.2, lambda: endpoint.take_over(anew=rng.random() < 0.5)),
    ]
    weights = [weight * rng.choice((0.1, 0.5, 1, 2)) for weight, _ in happenings]
    for _, happens in rng.choices(happenings, weights, k=steps):
        happens()
    endpoint.expect_everything_ends(rng.choice((None, below(8))))


def hunt_health(
    runs: int, health: type[CircuitBreaker] = CircuitBreaker, first_seed: int = 0
) -> None:
    """Walk `runs` times, each time with another seed."""
    for seed in range(first_seed, first_seed + runs):
        rng = random.Random(seed)
        try:
            _walk_circuit_breaker(Endpoint(1 + rng.randrange(8), health), rng, 300)
        except Violation as violation:
            violation.add_note(f"seed {seed}")
            raise


def _walk_generations(world: generations_model.World, rng: random.Random, steps: int) -> None:
    """Execute random steps, with different weights in each run."""
    below, chance = rng.randrange, lambda: rng.random() < 0.5
    blocks = chance()
    happenings: list[tuple[float, Callable[[], object]]] = [
        (6, lambda: world.publish(below(5), announced=chance())),
        (0.5, lambda: world.change(1 + below(4))),
        (1.5, world.notice),
        (20, lambda: world.proceed(below(16))),
        (2, lambda: world.proceed(below(16), rng.choice((Gate.PROBE, Gate.SHUT)))),
        (2, world.release),
        (6, lambda: world.fetched(below(8), 1 + below(4))),
        (
            10,
            lambda: world.response(
                below(8), rng.choice(STATUSES), received=chance(), blocks=blocks
            ),
        ),
        (8, lambda: world.write(1 + below(4))),
        (1, world.checkpoint),
        (2, lambda: world.tick(rng.choice((0.1, 1, 5, 30)))),
        (0.5, lambda: world.crash(below(4), received=chance())),
        (0.3, lambda: world.unblock(below(4))),
    ]
    weights = [weight * rng.choice((0.1, 0.5, 1, 2)) for weight, _ in happenings]
    for _, happens in rng.choices(happenings, weights, k=steps):
        happens()
    world.expect_everything_ends()


def hunt_generations(
    runs: int,
    lane: type[Lane] = Lane,
    generations: type[LaneGenerations] = LaneGenerations,
    faults: generations_model.Faults = generations_model.NO_FAULTS,
    first_seed: int = 0,
) -> None:
    """Walk `runs` times, each time with another seed."""
    for seed in range(first_seed, first_seed + runs):
        rng = random.Random(seed)
        world = generations_model.World(rng.randint(1, 3), lane, generations, faults)
        try:
            _walk_generations(world, rng, 300)
        except Violation as violation:
            violation.add_note(f"seed {seed}")
            raise
