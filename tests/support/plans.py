"""The actual cost of a statement: EXPLAIN ANALYZE, parsed and summed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.store.sql.message import literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncpg import Connection


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan of one table; nodes that were never executed are excluded."""

    node: str
    relation: str
    rows: float
    """Rows read, including filtered ones."""
    pages: int

    def __str__(self) -> str:
        return f"{self.node} on {self.relation}: {self.rows:.0f} rows, {self.pages} pages"


@dataclass(frozen=True, slots=True)
class Plan:
    """The scans of a statement."""

    scans: tuple[Scan, ...]
    rows: float
    pages: int
    """Pages of tables and indexes, counted per access."""
    memo_keys: tuple[str, ...]
    """By what the results of subqueries are memoized: they are hashed, compared and kept."""

    def __str__(self) -> str:
        whole = f"{self.rows:.0f} rows, {self.pages} pages in all"
        return "\n".join([whole, *map(str, self.scans)])

    def partitions(self, parent: str) -> set[int]:
        """The numbers of the scanned partitions of a parent."""
        names = (scan.relation.rpartition("_") for scan in self.scans)
        return {int(number) for name, _, number in names if name == parent and number.isdigit()}


async def explain(connection: Connection[Any], sql: str, *arguments: Any, generic: bool) -> Plan:
    """Run a statement as a prepared one, with a custom or a generic plan.

    EXPLAIN of a statement with parameters would always plan for their values; only EXECUTE follows
    `plan_cache_mode`.
    """
    values = f"({', '.join(map(literal, arguments))})" if arguments else ""
    mode = "force_generic_plan" if generic else "force_custom_plan"
    await connection.execute(f"SET plan_cache_mode = {mode}")
    await connection.execute(f"PREPARE explained AS {sql}")
    try:
        response = await connection.fetchval(
            f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE explained{values}"
        )
    finally:
        await connection.execute("DEALLOCATE explained")
    root = json.loads(response)[0]["Plan"]
    scans = tuple(_scan(node) for node in _nodes(root) if "Relation Name" in node)
    memo_keys = tuple(node["Cache Key"] for node in _nodes(root) if "Cache Key" in node)
    return Plan(scans, sum(scan.rows for scan in scans), _pages(root), memo_keys)


def _nodes(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if node["Actual Loops"] and node["Node Type"] != "ModifyTable":
        yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def _pages(node: Mapping[str, Any]) -> int:
    pages: int = node["Shared Hit Blocks"] + node["Shared Read Blocks"]
    return pages


def _scan(node: Mapping[str, Any]) -> Scan:
    # Both are averages over the loops.
    read = sum(
        node.get(each, 0)
        for each in ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
    )
    return Scan(node["Node Type"], node["Relation Name"], read * node["Actual Loops"], _pages(node))
