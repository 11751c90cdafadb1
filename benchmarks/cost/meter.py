"""Reads what a load has cost a PostgreSQL server, and the process that delivers.

Who delivers, its backends and the server's own processes all count: a queue whose dead rows
autovacuum has to remove pays for that. An idle backend may keep its counters of rows and fsyncs
for itself, but reports them at its end. So they are read before and after the whole turn, and what
the same turn without its load counts is subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from benchmarks.cpu import TICK_S, cpu_s, server_cpu_s

if TYPE_CHECKING:
    from asyncpg import Connection

US_PER_S = 1e6

READ_BYTES = """
SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn AS wal,
       (SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c
         WHERE c.relkind IN ('r', 'm')
           AND c.relnamespace NOT IN ('pg_catalog'::regnamespace, 'pg_toast'::regnamespace,
                                      'information_schema'::regnamespace)) AS disk
"""
READ_ROWS = """
SELECT tup_inserted + tup_updated + tup_deleted AS rows, tup_updated + tup_deleted AS dead
  FROM pg_stat_database WHERE datname = current_database()
"""
READ_FSYNCS = "SELECT wal_sync FROM pg_stat_wal"
READ_FSYNCS_18 = "SELECT sum(fsyncs) FROM pg_stat_io WHERE object = 'wal'"
WAL_IN_STAT_IO = 18
"""The first major version whose pg_stat_wal has no fsyncs."""

MEASURES = {
    "server": "us",
    "worker": "us",
    "WAL": "B",
    "disk": "B",
    "rows": "",
    "dead rows": "",
    "fsyncs": "",
}
"""The measures of a delivery, with their units. A row is inserted, updated or deleted; the latter
two leave a dead row."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The sums so far."""

    server_s: float
    worker_s: float
    wal_bytes: float
    disk_bytes: float


class Counters(NamedTuple):
    """What backends have counted so far."""

    rows: float
    dead_rows: float
    fsyncs: float


class Meter:
    """Reads before and after a load, in one database."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection
        self._readings: list[Reading] = []

    async def read(self, worker_pid: int) -> None:
        """Read before, and again after the load; the worker is a process with its children."""
        worker = psutil.Process(worker_pid)
        pid = await self._connection.fetchval("SELECT pg_backend_pid()")
        server_s = server_cpu_s(psutil.Process(pid).parent())
        worker_s = cpu_s((worker, *worker.children(recursive=True)))
        wal, disk = await self._connection.fetchrow(READ_BYTES)
        self._readings.append(Reading(server_s, worker_s, float(wal), float(disk)))

    async def counters(self) -> Counters:
        """Read the counters that backends have reported."""
        connection = self._connection
        rows, dead = await connection.fetchrow(READ_ROWS)
        is_in_stat_io = connection.get_server_version().major >= WAL_IN_STAT_IO
        fsyncs = await connection.fetchval(READ_FSYNCS_18 if is_in_stat_io else READ_FSYNCS)
        return Counters(float(rows), float(dead), float(fsyncs))

    async def sums(self, since: Counters) -> dict[str, float]:
        """Return each of `MEASURES`; without a load only those that are counted."""
        counted = await self.counters()
        counts = [float(now - before) for now, before in zip(counted, since, strict=True)]
        sums = dict(zip(("rows", "dead rows", "fsyncs"), counts, strict=True))
        if not self._readings:
            return sums
        before, after = self._readings
        return {
            "server": max(after.server_s - before.server_s, TICK_S) * US_PER_S,
            "worker": max(after.worker_s - before.worker_s, TICK_S) * US_PER_S,
            "WAL": after.wal_bytes - before.wal_bytes,
            "disk": after.disk_bytes - before.disk_bytes,
            **sums,
        }
