"""Random histories: finds what takes many steps sooner than Hypothesis does.

Every run has a seed, which a violation carries as a note.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from outbox.core.gaps import GapTracker
from outbox.core.lane import Lane
from tests.core import cursor_model, lane_model
from tests.core.cursor_model import Cursor
from tests.core.database_model import Database
from tests.core.lane_model import World
from tests.core.promises import Violation

if TYPE_CHECKING:
    from collections.abc import Callable

STATUSES = (200, 200, 200, 503, 503, 400, 409, None)


def _wander_cursor(cursor: Cursor, rng: random.Random, steps: int) -> None:
    """Let things happen at random, each run with weights of its own."""
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
        (0.1, lambda: database.burn(below(40))),
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
    """Wander `runs` times, each with its own seed."""
    for seed in range(first_seed, first_seed + runs):
        rng = random.Random(seed)
        database = Database(
            transactions_max=rng.randint(2, 5),
            keys=rng.randint(1, 2),
            prepare_renames=rng.random() < 0.3,
        )
        cursor = Cursor(database, tracker, faults, limit_max=rng.choice((1, 2, 5)))
        try:
            _wander_cursor(cursor, rng, 300)
        except Violation as violation:
            violation.add_note(f"seed {seed}")
            raise


def _wander_lane(world: World, rng: random.Random, steps: int) -> None:
    """Let things happen at random, each run with weights of its own."""
    below, chance = rng.randrange, lambda: rng.random() < 0.5
    happenings: list[tuple[float, Callable[[], object]]] = [
        (2, lambda: world.offer(1 + below(4))),
        (0.5, lambda: world.offer(1 + below(20), told=chance())),
        (0.5, lambda: world.offer(2, expires_in_s=5 * rng.random())),
        (0.3, lambda: world.erase(below(4))),
        (20, world.proceed),
        (6, lambda: world.fetched(1 + below(12))),
        (
            15,
            lambda: world.answer(
                rng.choice(STATUSES), received=chance(), u=rng.random(), after_s=rng.random()
            ),
        ),
        (8, lambda: world.write_group(1 + below(4))),
        (1, world.checkpoint),
        (3, lambda: world.tick(rng.choice((0.1, 1, 5, 30)))),
        (0.5, world.retry_now),
        (1, lambda: world.crash(below(4), received=chance(), skew_s=rng.choice((0, 0, -2, 2)))),
        (1, lambda: world.ghost(below(4))),
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
    """Wander `runs` times, each with its own seed."""
    for seed in range(first_seed, first_seed + runs):
        try:
            _wander_lane(World(lane, faults), random.Random(seed), 300)
        except Violation as violation:
            violation.add_note(f"seed {seed}")
            raise
