"""What a check says, and what it may look at."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from outbox.core.model.sql_names import quote_ident
from outbox.core.sequencing.partition_window import Keep
from outbox.store.replicas import CONNECTIONS_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from ipaddress import IPv4Network, IPv6Network

    from asyncpg import Connection

    Network = IPv4Network | IPv6Network

ROWS_MAX = 10
"""A check names at most so many lanes, endpoints or transactions, and counts the rest."""


STATEMENT_TIMEOUT_S = 5.0
"""A check asks the server nothing that takes longer."""

# Who may see other roles' sessions; pg_monitor may, too, and managed servers give that.
MAY_SEE = """
SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS seen, current_user AS role
"""


class Severity(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """Somebody should look at it; what is promised still holds."""
    PROBLEM = "problem"
    """Something stands still or may fail until somebody acts."""


class Subject(StrEnum):
    """What a check is about."""

    PRECONDITIONS = "preconditions"
    LIVE = "live health"


@dataclass(frozen=True, slots=True)
class Said:
    """One sentence of a check."""

    severity: Severity
    says: str
    do: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence, and which check it is from."""

    subject: Subject
    check: str
    severity: Severity
    says: str
    """What is so."""
    do: str | None
    """What to do about it; None: nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on something is worth a word."""

    clock_warning_s: float = 5.0
    clock_problem_s: float = 120.0
    """Receivers refuse a signature whose time stamp is five minutes off."""
    connections_free_min: int = CONNECTIONS_MAX
    """What one more relay opens."""
    lag_warning_s: float = 10.0
    lag_problem_s: float = 60.0
    listener_s: float = 10.0
    """A relay may take so long to begin to listen."""
    asleep_s: float = 120.0
    """Relays say for a minute at a time that they sleep."""
    unfinished_s: float = 60.0
    """A living relay removes or disables an endpoint within seconds."""
    certificate_s: float = 14 * 86400.0
    """Time to get another one."""
    overdue_s: float = 60.0
    """A tick is published within a second, and by another relay within a lease or two."""
    failing_s: float = 600.0
    holder_s: float = 60.0
    """A transaction that published should have ended by then."""
    transaction_s: float = 3600.0
    """An older one keeps dead rows from being cleaned away."""
    horizon_transactions: int = 1_000_000
    """What does not say how old it is keeps dead rows for long from so many on."""
    queue_share: float = 0.25
    queue_problem_share: float = 0.75
    """Of the server's queue of notifications."""
    dead_rows_min: int = 50_000
    dead_rows_share: float = 0.5
    """Autovacuum begins at a fifth; who is far beyond that is not getting it."""
    freeze_overdue: float = 2.0
    """In multiples of the age from which on autovacuum freezes whatever happens."""
    freeze_problem: int = 1_600_000_000
    """Of two thousand million transactions, after which the server takes no writes."""
    shells_max: int = 100
    """Empty partitions that wait for their owner: of two years, at some days for each."""
    probe_s: float = 5.0
    """A living relay sequences what is published within milliseconds."""
    probe_slow_ms: float = 1000.0


@dataclass(frozen=True, slots=True)
class Look:
    """The database as a check sees it, and what it may need to know besides."""

    db: Connection[Any]
    schema: str
    listening: bool = True
    """Relays with these settings have a connection for LISTEN."""
    pooled: bool = False
    """The database is reached through a proxy that pools transactions."""
    probing: bool = False
    """Send an event through the database, too."""
    refusal: Callable[[str, tuple[Network, ...]], str | None] = lambda _, __: None
    """Why a URL may not be delivered to with these settings and an endpoint's own networks;
    None: it may.
    """
    allow_networks: tuple[Network, ...] = ()
    """What these settings open for every endpoint."""
    clock: Callable[[], float] = time.time
    """This machine's time, in seconds since 1970."""
    keep: Keep = field(default_factory=Keep)
    """How long relays with these settings keep things."""
    limits: Limits = field(default_factory=Limits)

    def name(self, thing: str) -> str:
        """Something of ours as an operator's SQL has to name it."""
        plain = re.fullmatch("[a-z_][a-z0-9_]*", self.schema)
        return f"{self.schema if plain else quote_ident(self.schema)}.{thing}"


if TYPE_CHECKING:
    Check = Callable[[Look], AsyncIterator[Said]]


def ok(says: str) -> Said:
    """Nothing to do."""
    return Said(Severity.OK, says)


def warning(says: str, do: str) -> Said:
    """Somebody should look at it."""
    return Said(Severity.WARNING, says, do)


def problem(says: str, do: str) -> Said:
    """Somebody has to act."""
    return Said(Severity.PROBLEM, says, do)


def unseen(what: str, role: str) -> Said:
    """Other roles' sessions, of which PostgreSQL tells only some roles."""
    return warning(f"could not see {what}: needs pg_monitor", f'GRANT pg_monitor TO "{role}"')


def age(seconds: float) -> str:
    """A length of time in its largest unit, for sentences: `3 min`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def many(number: int, noun: str) -> str:
    """`1 event`, `2 events`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Sequence[str], total: int = 0) -> str:
    """`"a", "b" and 3 more`, of so many names in all."""
    more = max(total, len(names)) - len(names[:ROWS_MAX])
    shown = ", ".join(f'"{name}"' for name in names[:ROWS_MAX])
    return f"{shown} and {more} more" if more else shown


def rest(rows: list[Any], see: str) -> list[Said]:
    """What to say about the rows of a window `total` that were cut off."""
    more = rows[0]["total"] - len(rows) if rows else 0
    return [warning(f"and {more} more of that kind", see)] if more > 0 else []
