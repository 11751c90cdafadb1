"""Endpoints: what their operators and their receivers say."""

from __future__ import annotations

import shlex
from ipaddress import ip_network
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.model.cloud_metadata_ranges import exposing
from outbox.core.model.response import in_words, outcome
from outbox.core.sequencing.filter_budget import AGAIN_AFTER_S
from outbox.operations.doctor.finding import ROWS_MAX, age, listed, many, ok, problem, rest, warning
from outbox.operations.rotate_key import KEPT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.operations.doctor.finding import Look, Said

LIST = "outbox status"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


# Relays that are registered, by the keys that they decrypt with; those that have none
# of the keys that secrets are encrypted with.
BLIND_RELAYS = """
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
SELECT e.name, e.state, e.state_by, e.state_why,
       extract(epoch FROM clock_timestamp() - e.state_at)::float8 AS since_s,
       count(*) OVER () AS total
  FROM endpoint e WHERE e.state NOT IN ('active', 'removed')
 ORDER BY e.state_at LIMIT $1
"""

HEALTH = """
SELECT e.name, h.state, extract(epoch FROM clock_timestamp() - h.since)::float8 AS since_s,
       extract(epoch FROM h.held_until - clock_timestamp())::float8 AS held_s,
       h.last_answer::text AS last_answer, count(*) OVER () AS total
  FROM endpoint_health h JOIN endpoint e ON e.id = h.endpoint_id
 WHERE e.state = 'active' AND (h.state <> 'healthy' OR h.held_until > clock_timestamp())
 ORDER BY h.since LIMIT $1
"""

# The same for as long as the sequencer does not ask about them.
FILTERS = """
SELECT e.name, s.filter_stopped_why AS why,
       extract(epoch FROM clock_timestamp() - s.filter_stopped_at)::float8 AS since_s,
       count(*) OVER () AS total
  FROM subscription s JOIN endpoint e ON e.id = s.endpoint_id
 WHERE s.to_batch IS NULL AND s.filter_stopped_at > clock_timestamp() - make_interval(secs => $2)
   AND e.state IN ('active', 'paused')
 ORDER BY s.filter_stopped_at LIMIT $1
"""


async def secrets(look: Look) -> AsyncIterator[Said]:
    """How the secrets of endpoints are kept, and who can read them."""
    kept = {row["key"]: row["count"] for row in await look.db.fetch(KEPT)}
    in_clear = kept.pop(None, 0)
    keys = sorted(kept)
    if keys and in_clear:
        yield warning(
            f"{many(in_clear, 'secret')} of endpoints {_are(in_clear)} in clear, while others are "
            "encrypted",
            "outbox rekey",
        )
    elif in_clear:
        yield warning(
            f"{many(in_clear, 'secret')} of endpoints {_are(in_clear)} stored in clear: whoever "
            f"reads {look.name('endpoint_secret')}, or a backup of it, can sign",
            "give relays and operators an OUTBOX_KEY (outbox rekey --generate makes one), then "
            "run outbox rekey",
        )
    else:
        yield ok("no secret is stored in clear")
    if len(keys) > 1:
        yield warning(
            f"secrets are encrypted with {len(keys)} keys ({', '.join(keys)}), and all of them are "
            "needed",
            "outbox rekey",
        )
    blind = [row["name"] for row in await look.db.fetch(BLIND_RELAYS, keys)] if keys else []
    if blind:
        yield problem(
            f"{listed(blind)} cannot read the secrets of some endpoints, which stand still there",
            f"start {'it' if len(blind) == 1 else 'them'} with an OUTBOX_KEY that has the "
            f"{'key whose id is' if len(keys) == 1 else 'keys whose ids are'} {', '.join(keys)}",
        )


async def networks(look: Look) -> AsyncIterator[Said]:
    """Every URL may be delivered to."""
    refused: dict[str, list[str]] = {}
    exposed: dict[str, list[str]] = {}
    for row in await look.db.fetch(URLS):
        networks = tuple(map(ip_network, row["allow_networks"]))
        for leads in exposing(networks):
            exposed.setdefault(leads, []).append(row["name"])
        if (why := look.refusal(row["url"], networks)) is not None:
            refused.setdefault(why, []).append(row["name"])
    for why, names in islice(refused.items(), ROWS_MAX):
        yield warning(
            f"with the settings here, {listed(names)} cannot be delivered to: {why}",
            "set OUTBOX_ALLOW_NETWORKS as the relays have it, or change the URL",
        )
    everywhere = exposing(look.allow_networks)
    for why in everywhere:
        yield warning(
            f"OUTBOX_ALLOW_NETWORKS lets every endpoint go there: {why}",
            "open narrower ranges, or those of one endpoint: outbox endpoint update NAME "
            "--allow-network RANGE",
        )
    for why, names in islice(exposed.items(), ROWS_MAX):
        yield warning(
            f"open for {listed(names)}: {why}",
            "open narrower ranges: outbox endpoint update NAME --allow-network RANGE",
        )
    if not refused and not exposed and not everywhere:
        yield ok("no URL leads where these settings do not deliver")


async def certificates(look: Look) -> AsyncIterator[Said]:
    """How long the certificates are good that receivers are shown."""
    rows = await look.db.fetch(CERTIFICATES)
    for row in rows:
        if row["left_s"] < look.limits.certificate_s:
            name = shlex.quote(row["name"])
            says = "has ended" if row["left_s"] <= 0 else f"ends in {age(row['left_s'])}"
            tell = problem if row["left_s"] <= 0 else warning
            yield tell(
                f'the certificate that is shown to "{row["name"]}" {says}',
                f"outbox endpoint certificate {name} FILE",
            )
    if not rows:
        yield ok("no receiver is shown a certificate")
    elif all(row["left_s"] >= look.limits.certificate_s for row in rows):
        yield ok(f"{many(len(rows), 'certificate')} for receivers, none of which ends soon")


async def states(look: Look) -> AsyncIterator[Said]:
    """What is not delivered to, by somebody's word."""
    rows = await look.db.fetch(STATES, ROWS_MAX)
    for row in rows:
        yield _state(row, look)
    for said in rest(rows, LIST):
        yield said
    if not rows:
        yield ok("none is paused or disabled")


def _state(row: Any, look: Look) -> Said:
    by = f" by {row['state_by']}" if row["state_by"] else ""
    why = f" ({row['state_why']})" if row["state_why"] else ""
    name = shlex.quote(row["name"])
    says = f'endpoint "{row["name"]}" is {row["state"]} since {age(row["since_s"])}{by}{why}'
    match row["state"]:
        case "paused":
            return warning(
                f"{says}: its deliveries wait", f"when it may go on: outbox endpoint resume {name}"
            )
        case "disabled":
            return warning(
                f"{says}: it is owed nothing, and gets no events",
                f"when it works again: outbox endpoint enable {name}; then outbox dead replay "
                f"--endpoint {name}",
            )
        case _ if row["since_s"] > look.limits.unfinished_s:
            return problem(
                f"{says}: no relay has finished that",
                "start one: outbox relay; if one runs, see its log",
            )
        case _:
            return ok(says)


async def health(look: Look) -> AsyncIterator[Said]:
    """How receivers answer."""
    rows = await look.db.fetch(HEALTH, ROWS_MAX)
    for row in rows:
        yield _health(row)
    for said in rest(rows, LIST):
        yield said
    if not rows:
        yield ok("no endpoint is known to fail")


def _health(row: Any) -> Said:
    who = f'endpoint "{row["name"]}"'
    answer = orjson.loads(row["last_answer"]) if row["last_answer"] else {}
    told = f" ({in_words(outcome(answer))})" if answer else ""
    held = row["held_s"] if row["held_s"] and row["held_s"] > 0 else None
    until = f"; by its Retry-After nothing is sent for {age(held)} more" if held else ""
    name = shlex.quote(row["name"])
    since = age(row["since_s"])
    match row["state"]:
        case "failing":
            return warning(
                f"{who} fails since {since}{told}{until}",
                f"look at its receiver; to stop asking: outbox endpoint pause {name}",
            )
        case "refusing":
            return warning(
                f"{who} refuses whatever it is sent since {since}{told}{until}",
                f"compare its URL and secret with its receiver's: outbox endpoint show {name}",
            )
        case _ if held:
            return warning(f"{who} is {row['state']}{until}", "its receiver asked for that")
        case _:
            return ok(f"{who} is {row['state']} since {since}")


async def filters(look: Look) -> AsyncIterator[Said]:
    """Whose conditions are not asked any more."""
    rows = await look.db.fetch(FILTERS, ROWS_MAX, AGAIN_AFTER_S)
    for row in rows:
        name = shlex.quote(row["name"])
        yield warning(
            f'the filter of endpoint "{row["name"]}" counts as met since {age(row["since_s"])} '
            f"({row['why']}): it gets too much",
            f"make it simpler: outbox endpoint update {name} --filter …; else it is tried again "
            "after a day",
        )
    for said in rest(rows, LIST):
        yield said
    if not rows:
        yield ok("every filter is evaluated")
