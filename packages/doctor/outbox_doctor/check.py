"""What the checks of the doctor share: context, thresholds, results and their wording."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from outbox.core.delivery.signing_clock import CLOCKS_DIFFER_S
from outbox.core.model.schema_name import migrate_command
from outbox.core.model.sql_names import quote_ident
from outbox.core.sequencing.partition_window import Retention
from outbox.destinations.endpoint_validation import explain_url_rejection, policy_of
from outbox.store.cluster.sessions import RELAY_CONNECTIONS_MAX
from outbox.store.connection.secrets import CLEAR, Vault

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.network.egress import EgressPolicy

    Network = IPv4Network | IPv6Network

CHECK_STATEMENT_TIMEOUT_S = 5.0
"""Time limit of a check's statement."""

ROWS_MAX = 10
"""Maximum of lanes, endpoints or transactions that a check lists; the rest is counted."""


class Severity(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """Needs attention; all guarantees still hold."""
    PROBLEM = "problem"
    """Deliveries or publishing are stopped, or may fail, until an operator acts."""


class Subject(StrEnum):
    """Section of the report."""

    PRECONDITIONS = "preconditions"
    LIVE = "live health"


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One result, with its check and section."""

    subject: Subject
    check: str
    severity: Severity
    message: str
    """The observation."""
    action: str | None
    """The action to take; None: none."""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Findings of all checks."""

    schema: str
    problems: int
    warnings: int
    findings: list[DoctorFinding]


@dataclass(frozen=True, slots=True)
class DoctorLimits:
    """Thresholds of the checks."""

    clock_warning_s: float = 5.0
    clock_problem_s: float = CLOCKS_DIFFER_S
    """Receivers refuse a signature whose time is off by five minutes, and relays then try the other
    clock."""
    standby_s: float = 5.0
    """Time for a synchronous standby to confirm a commit."""
    connections_free_min: int = RELAY_CONNECTIONS_MAX
    """Connections that one more relay opens."""
    lag_warning_s: float = 10.0
    lag_problem_s: float = 60.0
    listener_s: float = 10.0
    """Time for a new relay to start to listen."""
    sleep_flag_max_s: float = 120.0
    """Maximum of the wake-up flag in the future; relays set it for a minute at a time."""
    unfinished_s: float = 60.0
    """A running relay removes or disables an endpoint within seconds."""
    certificate_s: float = 14 * 86400.0
    """Time left to renew a certificate."""
    overdue_s: float = 60.0
    """A run is published within a second, or after a failover within two leases."""
    moved_s: float = 2.0
    """Time in which a running relay publishes some of what is held for the shares of tenants, and
    advances each feed that waits for nothing."""
    failing_s: float = 600.0
    feed_s: float = 600.0
    """Time without a fed delivery after which a feed is watched for `moved_s`, and after which its
    pace is compared with that of new events."""
    holder_s: float = 60.0
    """Maximum duration of a transaction that has published."""
    transaction_s: float = 3600.0
    """An older transaction keeps VACUUM from removing dead rows."""
    horizon_transactions: int = 1_000_000
    """Age of a horizon in transaction ids, for slots and standbys, which have no start time."""
    queue_share: float = 0.25
    queue_problem_share: float = 0.75
    """Share of the server's notification queue in use."""
    dead_rows_min: int = 50_000
    dead_rows_share: float = 0.5
    """Autovacuum starts at a fifth; a share far above means that it does not run."""
    freeze_overdue: float = 2.0
    """Multiple of the age at which autovacuum forces a freeze."""
    freeze_problem: int = 1_600_000_000
    """Age in transactions that is a problem: the server rejects writes after two thousand
    million."""
    empty_partitions_max: int = 100
    """Empty partitions of dropped periods, about two years of them."""
    probe_s: float = 5.0
    """Time limit for the probe; a running relay sequences an event within milliseconds."""
    probe_slow_ms: float = 1000.0


@dataclass(frozen=True, slots=True)
class DoctorContext:
    """Context of a check: the connection, the settings and the thresholds."""

    db: Connection[Any]
    schema: str
    listening: bool = True
    """Relays with these settings have a connection for LISTEN."""
    pooled: bool = False
    """The database is reached through a proxy that pools transactions."""
    probing: bool = False
    """Publish a probe event."""
    policy: EgressPolicy | None = None
    """Egress rules of relays with these settings; None: brokers are not examined."""
    explain_url_rejection: Callable[[str, tuple[Network, ...], str | None], str | None] = (
        lambda *_: None
    )
    """Reason why egress rules reject a URL, given an endpoint's own networks and tenant; None:
    allowed."""
    allow_networks: tuple[Network, ...] = ()
    """Networks that the settings allow for all endpoints."""
    clock: Callable[[], float] = time.time
    """Clock of this machine, in seconds since 1970."""
    vault: Vault = CLEAR
    """The keys of these settings, to check encrypted secrets."""
    keep: Retention = field(default_factory=Retention)
    """Retention of relays with these settings."""
    limits: DoctorLimits = field(default_factory=DoctorLimits)

    @classmethod
    def from_settings(
        cls, db: Connection[Any], settings: Settings, *, probing: bool = False
    ) -> DoctorContext:
        """Return the context of checks with the settings of a process."""
        policy = policy_of(settings)
        return cls(
            db,
            settings.schema_name,
            listening=settings.notify and not settings.pooled,
            pooled=settings.pooled,
            probing=probing,
            policy=policy,
            explain_url_rejection=lambda url, networks, tenant: explain_url_rejection(
                url, policy, networks, tenant
            ),
            allow_networks=settings.allow_networks,
            vault=Vault.from_settings(settings),
            keep=settings.keep,
        )

    def qualify(self, thing: str) -> str:
        """Return the schema-qualified name of a schema object, for use in SQL."""
        plain = re.fullmatch("[a-z_][a-z0-9_]*", self.schema)
        return f"{self.schema if plain else quote_ident(self.schema)}.{thing}"

    def grant_command(self, purpose: str, role: str) -> str:
        """Return the command that grants a role the privileges of a purpose."""
        return f"{migrate_command(self.schema)} --{purpose} {shlex.quote(role)}"

    @asynccontextmanager
    async def read_only(self) -> AsyncIterator[None]:
        """A transaction of a check; its statements have a time limit."""
        # READ COMMITTED: some checks compare the snapshots of two consecutive statements.
        async with self.db.transaction(isolation="read_committed", readonly=True):
            await self.limit_statements()
            yield

    async def limit_statements(self) -> None:
        """Set the time limit of the statements of this transaction."""
        # SET LOCAL: behind a pooling proxy, a session setting would leak to other clients.
        limit_ms = int(CHECK_STATEMENT_TIMEOUT_S * 1000)
        await self.db.execute(f"SET LOCAL statement_timeout = {limit_ms}")

    async def fetch_first(self, query: str, *arguments: Any) -> list[Any]:
        """Fetch at most ROWS_MAX rows of a query, each with the number of all rows as `total`."""
        limited = f"SELECT *, count(*) OVER () AS total FROM ({query}) AS q LIMIT {ROWS_MAX}"  # noqa: S608
        rows: list[Any] = await self.db.fetch(limited, *arguments)
        return rows


class CheckResult(NamedTuple):
    """One result of a check."""

    severity: Severity
    message: str
    action: str | None = None


Results: TypeAlias = AsyncIterator[CheckResult]


@dataclass(frozen=True, slots=True)
class Check:
    """A check by its name in the report."""

    name: str
    passed: str
    """The message if there is no other result."""
    results: Callable[[DoctorContext], Results]
    begins_transactions: bool = False
    """It begins its own transactions; otherwise it runs in one, which is read-only."""


def check(
    name: str, passed: str = "", *, begins_transactions: bool = False
) -> Callable[[Callable[[DoctorContext], Results]], Check]:
    """Make a check of a function that returns its results."""
    return lambda results: Check(name, passed, results, begins_transactions)


def check_rows(
    name: str,
    query: str,
    passed: str,
    *,
    see: str = "outbox status",
    limit: Callable[[DoctorLimits], float] | None = None,
) -> Callable[[Callable[[Any], CheckResult]], Check]:
    """Make a check of a function that describes one row of a query.

    Args:
        see: where all rows are listed; the results list at most ROWS_MAX.
        limit: the threshold that the query has as $1.
    """

    def make_check(describe: Callable[[Any], CheckResult]) -> Check:
        async def results(context: DoctorContext) -> Results:
            arguments = () if limit is None else (limit(context.limits),)
            for result in await report_rows(context, describe, see, query, *arguments):
                yield result

        return Check(name, passed, results)

    return make_check


def ok(message: str) -> CheckResult:
    """A result without an action."""
    return CheckResult(Severity.OK, message)


def warning(message: str, do: str) -> CheckResult:
    """A result that needs attention."""
    return CheckResult(Severity.WARNING, message, do)


def problem(message: str, do: str) -> CheckResult:
    """A result that requires an action."""
    return CheckResult(Severity.PROBLEM, message, do)


async def report_rows(
    context: DoctorContext,
    describe: Callable[[Any], CheckResult],
    see: str,
    query: str,
    *arguments: Any,
) -> list[CheckResult]:
    """A result for each of the first rows of a query, and one for the others."""
    rows = await context.fetch_first(query, *arguments)
    return [*map(describe, rows), *count_others(rows, see)]


def count_others(rows: Sequence[Any], see: str) -> Iterable[CheckResult]:
    """A result for the rows beyond the listed ones, of `total`."""
    more = rows[0]["total"] - len(rows) if rows else 0
    return [warning(f"and {more} more of this kind", see)] if more > 0 else []


def missing_privilege(what: str, role: str) -> CheckResult:
    """A result for sessions of other roles, which PostgreSQL shows only to some roles."""
    return warning(f"could not see {what}: needs pg_monitor", f'GRANT pg_monitor TO "{role}"')


def settings_off(row: Any, effect: str, then: str = "") -> Iterable[CheckResult]:
    """A result for the settings of the server, by name, that are off."""
    off = [name for name, value in row.items() if not value]
    if off:
        wanted = " and ".join(f"{name} = on" for name in off)
        yield warning(
            f"{' and '.join(off)} {are(len(off))} off{effect}",
            f"set {wanted} in postgresql.conf{then}",
        )


def are(number: int) -> str:
    """The verb after a count."""
    return "is" if number == 1 else "are"


def join_names(names: Sequence[str], total: int = 0) -> str:
    """Join quoted names, at most ROWS_MAX of `total`: `"a", "b" and 3 more`."""
    more = max(total, len(names)) - len(names[:ROWS_MAX])
    shown = ", ".join(f'"{name}"' for name in names[:ROWS_MAX])
    return f"{shown} and {more} more" if more else shown
