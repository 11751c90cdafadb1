"""Doctor checks of endpoints: secrets, networks, certificates, states, health and filters."""

from __future__ import annotations

import shlex
from ipaddress import ip_network
from itertools import islice
from typing import TYPE_CHECKING, Any

import asyncpg
import orjson

from outbox.core.delivery.connection_reuse import DISTRUST_S
from outbox.core.model.cloud_metadata_ranges import exposed_metadata_warnings
from outbox.core.model.response import describe_response, outcome_fields
from outbox.core.sequencing.filter_budget import AGAIN_AFTER_S
from outbox.operations.doctor.finding import (
    ROWS_MAX,
    format_age,
    format_count,
    join_names,
    ok,
    problem,
    report_remaining,
    warning,
)
from outbox.operations.rotate_key import COUNT_SECRETS
from outbox.store.altered_secrets import read_altered_secrets
from outbox.store.endpoints import read_endpoints

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import CheckResult, DoctorContext

LIST = "outbox status"
ENDPOINTS_AT_ONCE = 500

READ_IDS = "SELECT id FROM endpoint WHERE state <> 'removed' ORDER BY id"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


# Live relays that lack one of the keys that secrets are encrypted with.
RELAYS_WITHOUT_KEYS = """
SELECT name FROM replica
 WHERE expires_at > clock_timestamp() AND NOT keys @> $1::text[] ORDER BY name
"""

URLS = """
SELECT name, url, allow_networks FROM endpoint WHERE state <> 'removed' ORDER BY name COLLATE "C"
"""

CERTIFICATES = """
SELECT name, extract(epoch FROM (identity_about ->> 'not_after')::timestamptz
                                - clock_timestamp())::float8 AS left_s
  FROM endpoint WHERE identity_about IS NOT NULL AND state <> 'removed' ORDER BY 2
"""

STATES = """
SELECT e.name, e.state, e.state_by, e.state_comment,
       extract(epoch FROM clock_timestamp() - e.state_at)::float8 AS since_s,
       count(*) OVER () AS total
  FROM endpoint e WHERE e.state NOT IN ('active', 'removed')
 ORDER BY e.state_at LIMIT $1
"""

HEALTH = """
SELECT e.name, h.state, extract(epoch FROM clock_timestamp() - h.since)::float8 AS since_s,
       extract(epoch FROM h.held_until - clock_timestamp())::float8 AS held_s,
       h.last_response::text AS last_response, count(*) OVER () AS total
  FROM endpoint_health h JOIN endpoint e ON e.id = h.endpoint_id
 WHERE e.state = 'active' AND (h.state <> 'healthy' OR h.held_until > clock_timestamp())
 ORDER BY h.since LIMIT $1
"""

# Endpoints without connection reuse because of unsolicited data.
UNSOLICITED = """
SELECT e.name, extract(epoch FROM clock_timestamp() - h.unsolicited_at)::float8 AS since_s,
       count(*) OVER () AS total
  FROM endpoint_health h JOIN endpoint e ON e.id = h.endpoint_id
 WHERE e.keep_alive AND e.state IN ('active', 'paused')
   AND h.unsolicited_at > clock_timestamp() - make_interval(secs => $2)
 ORDER BY h.unsolicited_at LIMIT $1
"""

# Filters that the sequencer has stopped evaluating.
FILTERS = """
SELECT e.name, s.filter_stopped_reason AS reason,
       extract(epoch FROM clock_timestamp() - s.filter_stopped_at)::float8 AS since_s,
       count(*) OVER () AS total
  FROM subscription s JOIN endpoint e ON e.id = s.endpoint_id
 WHERE s.to_batch IS NULL AND s.filter_stopped_at > clock_timestamp() - make_interval(secs => $2)
   AND e.state IN ('active', 'paused')
 ORDER BY s.filter_stopped_at LIMIT $1
"""


async def check_secrets(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Secrets are encrypted, with one key that all relays have."""
    kept = {row["key"]: row["count"] for row in await context.db.fetch(COUNT_SECRETS)}
    in_clear = kept.pop(None, 0)
    keys = sorted(kept)
    if keys and in_clear:
        yield warning(
            f"{format_count(in_clear, 'secret')} of endpoints {_are(in_clear)} stored in clear, "
            "others are "
            "encrypted",
            "outbox rekey",
        )
    elif in_clear:
        yield warning(
            f"{format_count(in_clear, 'secret')} of endpoints {_are(in_clear)} stored in clear: a "
            "reader "
            f"of {context.qualify('endpoint_secret')}, or of a backup, can forge signatures",
            "set OUTBOX_KEY for relays and operators (create one: outbox rekey --generate), then "
            "run outbox rekey",
        )
    else:
        yield ok("no secret is stored in clear")
    if len(keys) > 1:
        yield warning(
            f"secrets are encrypted with {len(keys)} keys ({', '.join(keys)}), and all relays need "
            "all of them",
            "outbox rekey",
        )
    blind = (
        [row["name"] for row in await context.db.fetch(RELAYS_WITHOUT_KEYS, keys)] if keys else []
    )
    if blind:
        yield problem(
            f"{join_names(blind)} cannot decrypt the secrets of some endpoints, "
            "whose deliveries wait",
            f"start {'it' if len(blind) == 1 else 'them'} with an OUTBOX_KEY that has the "
            f"{'key whose id is' if len(keys) == 1 else 'keys whose ids are'} {', '.join(keys)}",
        )


async def check_altered_secrets(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """No stored secret was changed outside of the commands and the API."""
    found = {row.name: row.reason for row in await read_altered_secrets(context.db)}
    if context.vault.key_ids:
        found |= await _find_altered_secrets(context)
    for name, reason in islice(sorted(found.items()), ROWS_MAX):
        yield problem(
            f'endpoint "{name}": {reason}',
            "find out who changed the table, and set the secret again: outbox endpoint "
            f"rotate-secret {shlex.quote(name)} --overlap 0 (or update, or certificate)",
        )
    if len(found) > ROWS_MAX:
        yield problem(
            f"secrets of {len(found) - ROWS_MAX} more endpoints were altered", "outbox status"
        )
    if not found:
        yield ok("no secret was altered")


async def _find_altered_secrets(context: DoctorContext) -> dict[str, str]:
    """Decrypt all secrets, and return why that fails, by endpoint."""
    found: dict[str, str] = {}
    ids = [row["id"] for row in await context.db.fetch(READ_IDS)]
    for first in range(0, len(ids), ENDPOINTS_AT_ONCE):
        try:
            endpoints = await read_endpoints(
                context.db, ids[first : first + ENDPOINTS_AT_ONCE], context.vault
            )
        except asyncpg.InsufficientPrivilegeError:
            # A reader sees what relays have journalled.
            return {}
        found |= {e.name: str(e.problem) for e in endpoints if e.secret_altered}
    return found


async def check_networks(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Egress rules allow every URL, and no network is opened too widely."""
    refused: dict[str, list[str]] = {}
    exposed: dict[str, list[str]] = {}
    for row in await context.db.fetch(URLS):
        networks = tuple(map(ip_network, row["allow_networks"]))
        for leads in exposed_metadata_warnings(networks):
            exposed.setdefault(leads, []).append(row["name"])
        if (reason := context.explain_url_rejection(row["url"], networks)) is not None:
            refused.setdefault(reason, []).append(row["name"])
    for reason, names in islice(refused.items(), ROWS_MAX):
        yield warning(
            f"these settings reject the URL of {join_names(names)}: {reason}",
            "set OUTBOX_ALLOW_NETWORKS to the same value as for the relays, or change the URL",
        )
    everywhere = exposed_metadata_warnings(context.allow_networks)
    for reason in everywhere:
        yield warning(
            f"OUTBOX_ALLOW_NETWORKS opens this for every endpoint: {reason}",
            "allow narrower ranges, or allow them for one endpoint: outbox endpoint update NAME "
            "--allow-network RANGE",
        )
    for reason, names in islice(exposed.items(), ROWS_MAX):
        yield warning(
            f"allowed for {join_names(names)}: {reason}",
            "allow narrower ranges: outbox endpoint update NAME --allow-network RANGE",
        )
    if not refused and not exposed and not everywhere:
        yield ok("these settings allow the URLs of all endpoints")


async def check_certificates(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Client certificates for mutual TLS do not expire soon."""
    rows = await context.db.fetch(CERTIFICATES)
    for row in rows:
        if row["left_s"] < context.limits.certificate_s:
            name = shlex.quote(row["name"])
            expiry = (
                "has expired" if row["left_s"] <= 0 else f"expires in {format_age(row['left_s'])}"
            )
            severity = problem if row["left_s"] <= 0 else warning
            yield severity(
                f'the client certificate for "{row["name"]}" {expiry}',
                f"renew it: outbox endpoint certificate {name} FILE",
            )
    if not rows:
        yield ok("no endpoint has a client certificate")
    elif all(row["left_s"] >= context.limits.certificate_s for row in rows):
        yield ok(f"{format_count(len(rows), 'client certificate')}, none of them expires soon")


async def check_states(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Endpoints that are paused, disabled or being removed."""
    rows = await context.db.fetch(STATES, ROWS_MAX)
    for row in rows:
        yield _state(row, context)
    for result in report_remaining(rows, LIST):
        yield result
    if not rows:
        yield ok("no endpoint is paused or disabled")


def _state(row: Any, context: DoctorContext) -> CheckResult:
    by = f" by {row['state_by']}" if row["state_by"] else ""
    reason = f" ({row['state_comment']})" if row["state_comment"] else ""
    name = shlex.quote(row["name"])
    message = (
        f'endpoint "{row["name"]}" has been {row["state"]}{by} for '
        f"{format_age(row['since_s'])}{reason}"
    )
    match row["state"]:
        case "paused":
            return warning(
                f"{message}: its deliveries wait", f"resume it: outbox endpoint resume {name}"
            )
        case "disabled":
            return warning(
                f"{message}: it receives no events",
                f"enable it: outbox endpoint enable {name}; then outbox dead replay "
                f"--endpoint {name}",
            )
        case _ if row["since_s"] > context.limits.unfinished_s:
            return problem(
                f"{message}: no relay has completed this",
                "start a relay: outbox relay; if one runs, see its log",
            )
        case _:
            return ok(message)


async def check_health(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Circuit breakers of active endpoints are closed."""
    rows = await context.db.fetch(HEALTH, ROWS_MAX)
    for row in rows:
        yield _health(row)
    for result in report_remaining(rows, LIST):
        yield result
    if not rows:
        yield ok("no endpoint is failing")


def _health(row: Any) -> CheckResult:
    who = f'endpoint "{row["name"]}"'
    response = orjson.loads(row["last_response"]) if row["last_response"] else {}
    last = f" ({describe_response(outcome_fields(response))})" if response else ""
    held = row["held_s"] if row["held_s"] and row["held_s"] > 0 else None
    until = f"; its Retry-After ends in {format_age(held)}" if held else ""
    name = shlex.quote(row["name"])
    since = format_age(row["since_s"])
    match row["state"]:
        case "failing":
            return warning(
                f"{who} has been failing for {since}{last}{until}",
                f"check its receiver; to stop requests: outbox endpoint pause {name}",
            )
        case "rejecting":
            return warning(
                f"{who} has been rejecting every request for {since}{last}{until}",
                f"compare its URL and secret with the receiver: outbox endpoint show {name}",
            )
        case _ if held:
            return warning(f"{who} is {row['state']}{until}", "wait; its receiver sent Retry-After")
        case _:
            return ok(f"{who} has been {row['state']} for {since}")


async def check_connection_reuse(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """Connections are reused: no receiver has sent unsolicited data lately."""
    rows = await context.db.fetch(UNSOLICITED, ROWS_MAX, DISTRUST_S)
    for row in rows:
        name = shlex.quote(row["name"])
        yield warning(
            f'the receiver of endpoint "{row["name"]}" sent data that belongs to no request, '
            f"{format_age(row['since_s'])} ago: deliveries until then may be acknowledged although "
            "it did not process them; until a day after it, each connection carries one request, "
            "and there are no delivery runs",
            "find the handler or proxy that responds twice or too early, and send again what is "
            f"missing (outbox replay --endpoint {name} --since …); if it cannot be repaired: "
            f"outbox endpoint update {name} --no-keep-alive",
        )
    for result in report_remaining(rows, LIST):
        yield result
    if not rows:
        yield ok("no receiver has sent unsolicited data")


async def check_filters(context: DoctorContext) -> AsyncIterator[CheckResult]:
    """The sequencer evaluates every filter."""
    rows = await context.db.fetch(FILTERS, ROWS_MAX, AGAIN_AFTER_S)
    for row in rows:
        name = shlex.quote(row["name"])
        yield warning(
            f'the filter of endpoint "{row["name"]}" has not been evaluated for '
            f"{format_age(row['since_s'])} "
            f"({row['reason']}): the endpoint receives events that it should not",
            f"simplify it: outbox endpoint update {name} --filter …; otherwise it is evaluated "
            "again "
            "after a day",
        )
    for result in report_remaining(rows, LIST):
        yield result
    if not rows:
        yield ok("every filter is evaluated")
