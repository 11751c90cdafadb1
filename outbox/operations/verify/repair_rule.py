"""A repair rule of `outbox verify --repair`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repair:
    """A kind of damage and its repair."""

    name: str
    action: str
    """Description of the repair, shown for confirmation."""
    find_sql: str
    """Returns `what`, `endpoint_id`, `before`, `after` and `columns`."""
    repair_sql: str
    columns: tuple[str, ...]
    key: str | None = None
    """The column whose values limit the finder; None: the tables that it reads are small."""
    recheck_sql: str | None = None
    """Returns what must not have changed since the finder read it; None: what it returns."""
    check: str | None = None
    """The check that finds the damage, too; None: it is part of the check `whole`."""
    expires_replicas: bool = False
    """Relays cache the repaired state, so they are expired and reload it."""

    @property
    def find_again_sql(self) -> str:
        """The finder, limited to values of the key, `$1`."""
        return _limit(self.find_sql)

    @property
    def unchanged_sql(self) -> str:
        """What must not have changed, limited likewise."""
        return _limit(self.recheck_sql or self.find_sql)


def _limit(sql: str) -> str:
    return sql.replace("/*:", "").replace(":*/", "")
