"""The README is correct: its commands are executed, and print the shown output."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

import outbox as package
from tests.support.documents import ROOT, Session, blocks, console, normalized, read
from tests.support.process import outbox
from tests.support.relay import fetchval
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.documents import Block
    from tests.support.postgres import Database

README_LINES_MAX = 200
WAIT_S = 60
README = read("README.md")
BLOCKS = blocks(README)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= README_LINES_MAX


def _blocks_in(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@pytest.mark.slow
@pytest.mark.one_major
async def test_the_walkthrough_prints_the_output_of_the_readme(
    empty_database: Database, tmp_path: Path
) -> None:
    session = Session(empty_database, tmp_path)
    arrived = "15:34:18 accepted  lane"
    (sql,) = _blocks_in("sql")
    try:
        for line, output in (each for block in _blocks_in("console") for each in console(block)):
            if line.startswith(("python3", "export OUTBOX_DSN")):
                continue
            # The receiver prints in the same terminal.
            published, _, received = output.partition(arrived)
            await session.run_line(line, published)
            if received:
                await _until_printed(session, arrived + received)
                await session.run(sql)
                await until(lambda: "key order-8" in session.printed("outbox listen"), WAIT_S)
    finally:
        await session.end()
    # The receiver has removed its own.
    left = "SELECT array_agg(name) FROM relay.endpoint WHERE state <> 'removed'"
    assert await fetchval(empty_database, left) == ["shop"]


async def _until_printed(session: Session, lines: str) -> None:
    await until(
        lambda: set(normalized(lines)) <= set(normalized(session.printed("outbox listen"))), WAIT_S
    )


@pytest.mark.one_major
async def test_the_python_example_publishes(database: Database, tmp_path: Path) -> None:
    session = Session(database, tmp_path)
    (example,) = _blocks_in("python")
    async with database.connection() as connection:
        await connection.execute("CREATE TABLE public.orders AS SELECT 7 AS id, false AS paid")
        session.names = {"outbox": package, "connection": connection}
        await session.run(example)
        assert await connection.fetchval("SELECT paid FROM public.orders")
        assert await connection.fetchval("SELECT key FROM relay.outbox") == "order-7"


@pytest.mark.slow
@pytest.mark.system
async def test_the_demo_prints_the_output_of_the_readme() -> None:
    ((line, output),) = console(_blocks_in("console")[0])
    assert line == "python3 run.py demo"
    ended = await outbox("demo", "--events", "120", "--seed", "17")
    assert ended.code == 0, ended.stderr

    def without_numbers(text: str) -> list[str]:
        kept = [re.sub(r"[\d,.]+", "#", line) for line in text.strip().splitlines()]
        return [re.sub(r" +", " ", line).strip() for line in kept]

    zeros = [line for line in output.splitlines() if "✓" in line]
    assert len(zeros) == 4
    assert all(line in ended.stdout.splitlines() for line in zeros)
    printed = without_numbers(ended.stdout)
    assert [line for line in without_numbers(output) if line not in printed] == []
    # From a checkout, what it says next installs the checkout: no index may have the package.
    assert f"  pip install {ROOT}" in ended.stdout.splitlines()


async def test_the_body_example_is_json(database: Database, tmp_path: Path) -> None:
    (example,) = _blocks_in("json")
    await Session(database, tmp_path).run(example)


def test_no_example_has_another_language() -> None:
    assert {block.language for block in BLOCKS} == {"console", "json", "python", "sql"}
