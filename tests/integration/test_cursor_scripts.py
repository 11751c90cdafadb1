"""Scripted interleavings: the real cursor is correct in each, and each incorrect variant fails.

A test that an incorrect cursor passes proves nothing, so both halves belong together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import cursor_variants as variants
from tests.support.cursor_checks import NO_VIOLATIONS, CursorViolations, check_cursor, finished
from tests.support.scripts import (
    SCRIPTS,
    Script,
    a_commit_comes_after_the_lock_of_the_cursor,
    a_prepared_transaction_outlives_a_crash,
)
from tests.support.sequencers import REAL, Variant
from tests.support.stage import staged

if TYPE_CHECKING:
    from tests.support.postgres import Database, Server

pytestmark = pytest.mark.system

TRIES = 3
"""The number of runs in which an incorrect cursor may be detected."""
MODEST_SCRIPTS = 6
"""The number of scripts of the cursor that does not read its own lock in the default tier."""
FAILURES = [
    pytest.param(script, variant, kind, id=f"{name}, when {script.name}")
    for script in SCRIPTS
    for name, (variant, kind) in script.fails.items()
]


async def _play(
    script: Script, database: Database, variant: Variant, *, strict: bool = False
) -> CursorViolations:
    async with staged(database, variant, strict=strict) as stage:
        await script.play(stage)
        await stage.settle()
        async with database.connection() as connection:
            violations = await check_cursor(connection)
            assert violations != NO_VIOLATIONS or await finished(connection)
            return violations


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
async def test_the_cursor_is_correct_in_every_interleaving(
    script: Script, database: Database
) -> None:
    assert await _play(script, database, REAL, strict=True) == NO_VIOLATIONS


@pytest.mark.one_major
@pytest.mark.parametrize(
    "script",
    [
        # The first scripts stand for the others, all of which the real cursor passes in every tier.
        pytest.param(script, id=script.name, marks=() if n < MODEST_SCRIPTS else pytest.mark.full)
        for n, script in enumerate(SCRIPTS)
    ],
)
async def test_the_cursor_is_correct_without_reading_its_own_lock(
    script: Script, database: Database
) -> None:
    assert await _play(script, database, variants.MODEST, strict=True) == NO_VIOLATIONS


@pytest.mark.one_major
@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_the_cursor_sets_its_own_isolation(isolation: str, database: Database) -> None:
    async with database.connection() as connection:
        await connection.execute(
            f"ALTER DATABASE {database.name} SET default_transaction_isolation = '{isolation}'"
        )
    script = Script(a_commit_comes_after_the_lock_of_the_cursor)
    assert await _play(script, database, REAL, strict=True) == NO_VIOLATIONS


@pytest.mark.one_major
@pytest.mark.parametrize(("script", "variant", "kind"), FAILURES)
async def test_an_incorrect_cursor_is_detected(
    script: Script, variant: Variant, kind: str, server: Server
) -> None:
    """One script must hit the moment in which a commit releases its locks."""
    found: set[str] = set()
    for _ in range(TRIES):
        async with server.database() as database:
            found |= (await _play(script, database, variant)).kinds()
        if kind in found:
            break
    assert kind in found


CRASH = Script(a_prepared_transaction_outlives_a_crash)


async def test_the_cursor_is_correct_after_a_crash(private_database: Database) -> None:
    assert await _play(CRASH, private_database, REAL, strict=True) == NO_VIOLATIONS


@pytest.mark.one_major
async def test_either_protection_is_sufficient_in_a_crash_and_one_is_necessary(
    private_server: Server,
) -> None:
    protected = {"forgetting": variants.DEAF, "keeping the holders": variants.REMEMBERING}
    for name, variant in protected.items():
        async with private_server.database() as database:
            assert await _play(CRASH, database, variant, strict=True) == NO_VIOLATIONS, name
    async with private_server.database() as database:
        violations = await _play(CRASH, database, variants.REMEMBERING_DEAF)
        assert "lost" in violations.kinds()
