"""Checks of endpoints: secrets, networks, certificates, states, health and filters."""

from __future__ import annotations

import asyncio
import shlex
from ipaddress import ip_network
from itertools import islice
from typing import Any

import asyncpg
import orjson

from outbox.core.delivery.connection_reuse import DISTRUST_S
from outbox.core.model.cloud_metadata_ranges import exposed_metadata_warnings
from outbox.core.model.duration import rounded
from outbox.core.model.stored_response import describe_response, outcome_fields
from outbox.core.model.text import count
from outbox.core.sequencing.filter_budget import AGAIN_AFTER_S
from outbox.destinations.broker_check import examine_broker
from outbox.operations.lanes import HEALTH_SINCE
from outbox.store.delivery.altered_secrets import read_altered_secrets
from outbox.store.delivery.endpoints import read_endpoints
from outbox.store.sql.expressions import lease_runs
from outbox.store.sql.type_match import SUBSCRIBERS
from outbox_doctor.check import (
    ROWS_MAX,
    CheckResult,
    DoctorContext,
    Results,
    are,
    check,
    check_rows,
    join_names,
    ok,
    problem,
    warning,
)
from outbox_doctor.maintenance.rotate_key import COUNT_SECRETS

# Live relays that lack one of the keys that secrets are encrypted with.
RELAYS_WITHOUT_KEYS = f"""
SELECT name FROM replica
 WHERE {lease_runs("replica")} AND NOT keys @> $1::text[] ORDER BY name
"""  # noqa: S608 (constants only)


@check("secrets")
async def secrets(context: DoctorContext) -> Results:
    """Secrets are encrypted, with one key that all relays have."""
    kept = {row["key"]: row["count"] for row in await context.db.fetch(COUNT_SECRETS)}
    in_clear = kept.pop(None, 0)
    keys = sorted(kept)
    stored = f"{count(in_clear, 'secret')} of endpoints {are(in_clear)} stored in clear"
    if keys and in_clear:
        yield warning(f"{stored}, others are encrypted", "outbox rekey")
    elif in_clear:
        yield warning(
            f"{stored}: a reader of {context.qualify('endpoint_secret')}, or of a backup, can "
            "forge signatures",
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
    rows = await context.db.fetch(RELAYS_WITHOUT_KEYS, keys) if keys else []
    if rows:
        yield problem(
            f"{join_names([row['name'] for row in rows])} cannot decrypt the secrets of some "
            "endpoints, whose deliveries wait",
            f"start {'it' if len(rows) == 1 else 'them'} with an OUTBOX_KEY that has the "
            f"{'key whose id is' if len(keys) == 1 else 'keys whose ids are'} {', '.join(keys)}",
        )


READ_IDS = "SELECT id FROM endpoint WHERE state <> 'removed' ORDER BY id"
CHECKED_AT_ONCE = 500


@check("altered secrets", passed="no secret was altered")
async def altered_secrets(context: DoctorContext) -> Results:
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
            f"secrets of {count(len(found) - ROWS_MAX, 'more endpoint')} were altered",
            "outbox status",
        )


async def _find_altered_secrets(context: DoctorContext) -> dict[str, str]:
    """Decrypt all secrets, and return why that fails, by endpoint."""
    found: dict[str, str] = {}
    ids = [row["id"] for row in await context.db.fetch(READ_IDS)]
    for first in range(0, len(ids), CHECKED_AT_ONCE):
        some = ids[first : first + CHECKED_AT_ONCE]
        try:
            endpoints = await read_endpoints(context.db, some, context.vault)
        except asyncpg.InsufficientPrivilegeError:
            # A reader sees what relays have journalled.
            return {}
        found |= {e.name: str(e.problem) for e in endpoints if e.secret_altered}
    return found


URLS = """
SELECT name, url, allow_networks, tenant FROM endpoint WHERE state <> 'removed'
 ORDER BY name COLLATE "C"
"""


NETWORKS_PASSED = (
    "the settings of this command allow the URLs of all endpoints; those of a relay may differ"
)


@check("networks", passed=NETWORKS_PASSED)
async def networks(context: DoctorContext) -> Results:
    """Egress rules allow every URL, and no network is opened too widely."""
    refused: dict[str, list[str]] = {}
    exposed: dict[str, list[str]] = {}
    for row in await context.db.fetch(URLS):
        allowed = tuple(map(ip_network, row["allow_networks"]))
        for reason in exposed_metadata_warnings(allowed):
            exposed.setdefault(reason, []).append(row["name"])
        refusal = context.explain_url_rejection(row["url"], allowed, row["tenant"])
        if refusal is not None:
            refused.setdefault(refusal, []).append(row["name"])
    for reason, names in islice(refused.items(), ROWS_MAX):
        yield warning(
            f"the settings of this command reject the URL of {join_names(names)}: {reason}",
            "set OUTBOX_ALLOW_NETWORKS to the same value as for the relays, or change the URL",
        )
    narrow = "outbox endpoint update NAME --allow-network RANGE"
    for reason in exposed_metadata_warnings(context.allow_networks):
        yield warning(
            f"OUTBOX_ALLOW_NETWORKS opens this for every endpoint: {reason}",
            f"allow narrower ranges, or allow them for one endpoint: {narrow}",
        )
    for reason, names in islice(exposed.items(), ROWS_MAX):
        yield warning(
            f"allowed for {join_names(names)}: {reason}", f"allow narrower ranges: {narrow}"
        )


BROKERS = """
SELECT id FROM endpoint
 WHERE state IN ('active', 'paused') AND url !~* '^https?://' ORDER BY name COLLATE "C" LIMIT $1
"""
BROKERS_MAX = 50


@check("brokers", begins_transactions=True)
async def brokers(context: DoctorContext) -> Results:
    """Brokers can be reached, and their settings keep what is promised."""
    async with context.read_only():
        ids = [row["id"] for row in await context.db.fetch(BROKERS, BROKERS_MAX)]
        if not ids or context.policy is None:
            yield ok("no endpoint has a broker" if not ids else "brokers were not examined")
            return
        endpoints = await read_endpoints(context.db, ids, context.vault)
    usable = [each for each in endpoints if each.problem is None]
    policy = context.policy
    examined = await asyncio.gather(*(examine_broker(each, policy) for each in usable))
    for endpoint, findings in zip(usable, examined, strict=True):
        for each in findings:
            make_result = problem if each.is_error else warning
            yield make_result(f'the broker of "{endpoint.name}": {each.what}', each.what_to_do)
    if not any(examined):
        yield ok(f"{count(len(usable), 'broker')} can be used as configured")


CERTIFICATES = """
SELECT name, extract(epoch FROM (identity_about ->> 'not_after')::timestamptz
                                - clock_timestamp())::float8 AS left_s
  FROM endpoint WHERE identity_about IS NOT NULL AND state <> 'removed' ORDER BY 2
"""


@check("certificates")
async def certificates(context: DoctorContext) -> Results:
    """Client certificates for mutual TLS do not expire soon."""
    rows = await context.db.fetch(CERTIFICATES)
    expiring = [row for row in rows if row["left_s"] < context.limits.certificate_s]
    for row in expiring:
        expired = row["left_s"] <= 0
        expiry = "has expired" if expired else f"expires in {rounded(row['left_s'])}"
        make_result = problem if expired else warning
        yield make_result(
            f'the client certificate for "{row["name"]}" {expiry}',
            f"renew it: outbox endpoint certificate {shlex.quote(row['name'])} FILE",
        )
    if not rows:
        yield ok("no endpoint has a client certificate")
    elif not expiring:
        yield ok(f"{count(len(rows), 'client certificate')}, none of them expires soon")


STATES = """
SELECT name, state, state_by, state_comment,
       extract(epoch FROM clock_timestamp() - state_at)::float8 AS since_s,
       clock_timestamp() - state_at > make_interval(secs => $1) AS overdue
  FROM endpoint WHERE state NOT IN ('active', 'removed')
 ORDER BY state_at
"""


@check_rows(
    "endpoints",
    STATES,
    "no endpoint is paused or disabled",
    limit=lambda limits: limits.unfinished_s,
)
def states(row: Any) -> CheckResult:
    """Endpoints that are paused, disabled or being removed."""
    by = f" by {row['state_by']}" if row["state_by"] else ""
    reason = f" ({row['state_comment']})" if row["state_comment"] else ""
    since = rounded(row["since_s"])
    message = f'endpoint "{row["name"]}" has been {row["state"]}{by} for {since}{reason}'
    name = shlex.quote(row["name"])
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
        case _ if row["overdue"]:
            return problem(
                f"{message}: no relay has completed this",
                "start a relay: outbox relay; if one runs, see its log",
            )
        case _:
            return ok(message)


HEALTH = f"""
SELECT e.name, h.state, extract(epoch FROM clock_timestamp() - {HEALTH_SINCE})::float8 AS since_s,
       extract(epoch FROM h.held_until - clock_timestamp())::float8 AS held_s,
       h.last_response::text AS last_response
  FROM endpoint_health h JOIN endpoint e ON e.id = h.endpoint_id
 WHERE e.state = 'active' AND (h.state <> 'healthy' OR h.held_until > clock_timestamp())
 ORDER BY h.since
"""  # noqa: S608 (constants only)


@check_rows("health", HEALTH, "no endpoint is failing")
def health(row: Any) -> CheckResult:
    """The circuit breaker of an active endpoint is not closed, or its receiver sent Retry-After."""
    who = f'endpoint "{row["name"]}"'
    response = orjson.loads(row["last_response"]) if row["last_response"] else {}
    last = f" ({describe_response(outcome_fields(response))})" if response else ""
    held = row["held_s"] if row["held_s"] and row["held_s"] > 0 else None
    until = f"; its Retry-After ends in {rounded(held)}" if held else ""
    name = shlex.quote(row["name"])
    since = rounded(row["since_s"])
    match row["state"]:
        case "failing":
            return warning(
                f"{who} has been failing for {since}{last}{until}",
                "check its receiver; outbox status names the delivery that fails; to stop "
                f"requests: outbox endpoint pause {name}",
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


# Endpoints without connection reuse because of unsolicited data.
UNSOLICITED = f"""
SELECT e.name, extract(epoch FROM clock_timestamp() - h.unsolicited_at)::float8 AS since_s
  FROM endpoint_health h JOIN endpoint e ON e.id = h.endpoint_id
 WHERE e.keep_alive AND e.state IN ('active', 'paused')
   AND h.unsolicited_at > clock_timestamp() - make_interval(secs => {DISTRUST_S})
 ORDER BY h.unsolicited_at
"""  # noqa: S608 (a constant only)


@check_rows("keep-alive", UNSOLICITED, "no receiver has sent unsolicited data")
def connection_reuse(row: Any) -> CheckResult:
    """A receiver has sent unsolicited data, so its connections are not reused."""
    name = shlex.quote(row["name"])
    return warning(
        f'the receiver of endpoint "{row["name"]}" sent data that belongs to no request, '
        f"{rounded(row['since_s'])} ago: deliveries until then may be acknowledged although "
        "it did not process them; until a day after it, each connection carries one request, "
        "and there are no request runs",
        "find the handler or proxy that responds twice or too early, and send again what is "
        f"missing (outbox replay --endpoint {name} --since …); if it cannot be repaired: "
        f"outbox endpoint update {name} --no-keep-alive",
    )


# Filters that the sequencer has stopped evaluating.
FILTERS = f"""
SELECT e.name, s.filter_stopped_reason AS reason,
       extract(epoch FROM clock_timestamp() - s.filter_stopped_at)::float8 AS since_s
  FROM {SUBSCRIBERS} s JOIN endpoint e ON e.id = s.endpoint_id
 WHERE s.filter_stopped_at BETWEEN clock_timestamp() - make_interval(secs => {AGAIN_AFTER_S})
                               AND clock_timestamp()
   AND e.state IN ('active', 'paused')
 ORDER BY s.filter_stopped_at
"""  # noqa: S608 (constants only)


@check_rows("filters", FILTERS, "every filter is evaluated")
def filters(row: Any) -> CheckResult:
    """The sequencer does not evaluate a filter."""
    return warning(
        f'the filter of endpoint "{row["name"]}" has not been evaluated for '
        f"{rounded(row['since_s'])} ({row['reason']}): the endpoint receives events that it "
        "should not",
        f"simplify it: outbox endpoint update {shlex.quote(row['name'])} --filter …; otherwise it "
        "is evaluated again after a day",
    )
