"""What the dashboard shows, row by row, in PromQL.

`$job` is an installation.  What the replica that leads tells is asked of whoever leads
now; what all of them count is added up, or narrowed to `$instance` and `$endpoint`.
"""

from __future__ import annotations

from outbox.telemetry.alerts.panel import Panel, Row

_JOB = 'job="$job"'
_HERE = f'{_JOB}, instance=~"$instance"'
_ENDPOINT = f'{_HERE}, endpoint=~"$endpoint"'
_FAILED = 'outcome!="delivered"'


def _rate(metric: str, labels: str, by: str, window: str = "$__rate_interval") -> str:
    return f"sum by ({by}) (rate({metric}{{{labels}}}[{window}]))"


def _quantile(q: float, metric: str, labels: str, window: str = "$__rate_interval") -> str:
    buckets = _rate(f"{metric}_bucket", labels, "le", window)
    return f"histogram_quantile({q}, {buckets})"


def _quantiles(metric: str, labels: str) -> tuple[tuple[str, str], ...]:
    return tuple((_quantile(q, metric, labels), f"p{q * 100:.0f}") for q in (0.5, 0.95, 0.99))


def _failed(metric: str, labels: str, window: str) -> str:
    """The share of what failed.

    Where nothing ever failed there may be no series of it: none of many is 0, and only none
    of none is nothing.
    """
    part = f"sum(increase({metric}{{{labels}, {_FAILED}}}[{window}]))"
    whole = f"sum(increase({metric}{{{labels}}}[{window}]))"
    return f"({part} or 0 * {whole}) / ({whole} > 0)"


def _leader(metric: str) -> str:
    """What the replica that leads tells."""
    return f"{metric}{{{_JOB}}} and on (job, instance) outbox_replica_leads{{{_JOB}}} == 1"


def _top(metric: str, by: str) -> str:
    """The ten endpoints where it is most."""
    return f"topk(10, max by ({by}) ({metric}{{{_ENDPOINT}}}))"


def _owed(endpoints: str) -> str:
    """By endpoint; one that moves is told by two replicas for a moment, and owed once."""
    return (
        f'max by (endpoint) (outbox_backlog{{{endpoints}, endpoint!="(other)"}}) or '
        f'sum by (endpoint) (outbox_backlog{{{endpoints}, endpoint="(other)"}})'
    )


_SUCCESS = "1 - " + _failed("outbox_deliveries_total", _ENDPOINT, "1h")
_P95 = _quantile(0.95, "outbox_delivery_latency_seconds", _ENDPOINT, "5m")
_ALL_OWED = f"sum({_owed(_ENDPOINT)})"
_DEAD = f"max({_leader('outbox_dead_letters')})"

FINE = Row(
    "Are we fine?",
    (
        Panel(
            "Success rate",
            "percentunit",
            "Of the deliveries that ended in the last hour, how many were acknowledged. The "
            "others were given up, and are dead letters.",
            ((_SUCCESS, "delivered"),),
            kind="stat",
            width=6,
            steps=((None, "red"), (0.999, "green")),
            decimals=3,
        ),
        Panel(
            "Commit to acknowledgement, p95",
            "s",
            "95 of 100 deliveries of the last five minutes took up to so long, from the commit "
            "of the event on. Replays and backfills are left out.",
            ((_P95, "p95"),),
            kind="stat",
            width=6,
            steps=((None, "green"), (5, "orange"), (10, "red")),
        ),
        Panel(
            "Backlog",
            "short",
            "Deliveries that are owed to all endpoints.",
            ((_ALL_OWED, "owed"),),
            kind="stat",
            width=6,
            steps=((None, "green"), (1000, "orange")),
        ),
        Panel(
            "Dead letters",
            "short",
            "Given up, and waiting for an operator: outbox dead count. More than 100,000 are not "
            "counted; a range is one, however many deliveries it stands for.",
            ((_DEAD, "dead letters"),),
            kind="stat",
            width=6,
            steps=((None, "green"), (10, "orange"), (100, "red")),
        ),
        Panel(
            "Commit to acknowledgement",
            "s",
            "How long deliveries took, from the commit of the event on.",
            _quantiles("outbox_delivery_latency_seconds", _ENDPOINT),
        ),
        Panel(
            "Backlog and dead letters",
            "short",
            "Deliveries that are owed, and those that were given up.",
            ((_ALL_OWED, "owed"), (_DEAD, "dead letters")),
        ),
    ),
)

DELIVERED = Row(
    "Deliveries and attempts",
    (
        Panel(
            "Deliveries that ended",
            "cps",
            "By how they ended: delivered, or the reason why they were given up.",
            ((_rate("outbox_deliveries_total", _ENDPOINT, "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Requests",
            "reqps",
            "By how they were answered: delivered, to be tried again, or refused.",
            ((_rate("outbox_attempts_total", _ENDPOINT, "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Requests that failed",
            "percentunit",
            "Of all requests, those that were not answered with a success.",
            ((_failed("outbox_attempts_total", _ENDPOINT, "$__rate_interval"), "failed"),),
            width=8,
        ),
        Panel(
            "Why requests fail",
            "reqps",
            "By the class of the answer's status, or why there was no answer.",
            (
                (
                    _rate("outbox_attempts_total", f"{_ENDPOINT}, {_FAILED}", "error_type"),
                    "{{error_type}}",
                ),
            ),
            width=8,
            stacked=True,
        ),
        Panel(
            "How long requests take",
            "s",
            "From the look-up of the address to the answer.",
            _quantiles("outbox_attempt_duration_seconds", _ENDPOINT),
            width=8,
        ),
    ),
)

RETRIED = Row(
    "Retries",
    (
        Panel(
            "Retries",
            "reqps",
            "Second and further requests for a delivery, by how they were answered.",
            ((_rate("outbox_retries_total", _HERE, "outcome"), "{{outcome}}"),),
            width=6,
            stacked=True,
        ),
        Panel(
            "Retries that failed",
            "percentunit",
            "Of all retries of a quarter of an hour, those that failed again.",
            ((_failed("outbox_retries_total", _HERE, "15m"), "failed"),),
            width=6,
        ),
        Panel(
            "Time to the next try",
            "s",
            "How long a delivery waits after a request that failed.",
            _quantiles("outbox_retry_delay_seconds", _HERE),
            width=6,
        ),
        Panel(
            "Requests for a delivery",
            "short",
            "How many it took until a delivery was acknowledged or given up.",
            _quantiles("outbox_delivery_attempts", _HERE),
            width=6,
        ),
    ),
)

AT_ENDPOINTS = Row(
    "Endpoints",
    (
        Panel(
            "Owed most",
            "short",
            "The ten endpoints with the largest backlog, now.",
            ((f"topk(10, {_owed(_ENDPOINT)})", "{{endpoint}}"),),
            kind="bargauge",
            width=8,
        ),
        Panel(
            "Waiting longest",
            "s",
            "Age of the oldest event that is next in a lane, of the ten endpoints where it is "
            "oldest, now.",
            ((_top("outbox_lane_head_age_seconds", "endpoint"), "{{endpoint}}"),),
            kind="bargauge",
            width=8,
            steps=((None, "green"), (1800, "orange")),
        ),
        Panel(
            "In trouble longest",
            "s",
            "Since when endpoints have been failing, refusing or recovering, now.",
            (
                (
                    _top("outbox_endpoint_trouble_age_seconds", "endpoint, state"),
                    "{{endpoint}}: {{state}}",
                ),
            ),
            kind="bargauge",
            width=8,
            steps=((None, "green"), (900, "orange")),
        ),
        Panel(
            "Deepest lanes",
            "short",
            "What the deepest lane of an endpoint owes, of the ten endpoints where it is most.",
            ((_top("outbox_lane_depth", "endpoint"), "{{endpoint}}"),),
            width=8,
        ),
        Panel(
            "Endpoints",
            "short",
            "By the state of their breaker.",
            ((f"sum by (state) (outbox_endpoints{{{_HERE}}})", "{{state}}"),),
            width=8,
            stacked=True,
        ),
        Panel(
            "Lanes",
            "short",
            "Idle, owing, failing (the head was tried), or blocked (an operator has to help).",
            ((f"sum by (state) (outbox_lanes{{{_HERE}}})", "{{state}}"),),
            width=8,
            stacked=True,
        ),
    ),
)

SEQUENCED = Row(
    "Sequencing",
    (
        Panel(
            "Events",
            "cps",
            "Events that were sequenced.",
            ((f"sum(rate(outbox_events_total{{{_HERE}}}[$__rate_interval]))", "events"),),
            width=6,
        ),
        Panel(
            "Lag",
            "s",
            "How long ago everything that was committed had last been read. Up to OUTBOX_POLL_S "
            "while nothing is published.",
            ((f"max({_leader('outbox_relay_lag_seconds')})", "lag"),),
            width=6,
        ),
        Panel(
            "Oldest gap",
            "s",
            "Since when a transaction that publishes has been open. Its events wait; no others.",
            ((f"max({_leader('outbox_gap_age_seconds')})", "age"),),
            width=6,
        ),
        Panel(
            "Horizon",
            "s",
            "Age of the oldest transaction that keeps dead rows from being cleaned away.",
            ((f"max({_leader('outbox_horizon_age_seconds')})", "age"),),
            width=6,
        ),
    ),
)

RUNNING = Row(
    "Replicas and process",
    (
        Panel(
            "Who leads",
            "short",
            "1: this replica sequences; 0: it stands by.",
            ((f"max by (instance) (outbox_replica_leads{{{_HERE}}})", "{{instance}}"),),
            kind="state-timeline",
            width=8,
            steps=((None, "blue"), (1, "green")),
        ),
        Panel(
            "Replicas",
            "short",
            "Registered ones. A lapsed one did not renew its lease.",
            ((f"max by (state) ({_leader('outbox_replicas')})", "{{state}}"),),
            width=8,
        ),
        Panel(
            "Losses",
            "short",
            "Replicas that were found dead, and sessions that were lost and begun anew, in five "
            "minutes.",
            (
                (
                    f"sum(increase(outbox_replica_losses_total{{{_HERE}}}[5m]))",
                    "replicas found dead",
                ),
                (
                    f"sum by (instance) (increase(outbox_session_losses_total{{{_HERE}}}[5m]))",
                    "sessions of {{instance}}",
                ),
            ),
            width=8,
        ),
        Panel(
            "Requests that are out",
            "short",
            "At most OUTBOX_IN_FLIGHT_MAX of a replica, and those that wait for their turn.",
            (
                (f"sum by (instance) (outbox_requests_in_flight{{{_HERE}}})", "{{instance}}"),
                (
                    f"sum by (reason) (outbox_requests_waiting{{{_HERE}}})",
                    "waiting: {{reason}}",
                ),
            ),
            width=6,
        ),
        Panel(
            "CPU",
            "percentunit",
            "Of one core; the relay uses one.",
            ((f"rate(process_cpu_seconds_total{{{_HERE}}}[$__rate_interval])", "{{instance}}"),),
            width=6,
        ),
        Panel(
            "Memory",
            "bytes",
            "Resident memory.",
            ((f"process_resident_memory_bytes{{{_HERE}}}", "{{instance}}"),),
            width=6,
        ),
        Panel(
            "Open files",
            "short",
            "Files and connections.",
            ((f"process_open_fds{{{_HERE}}}", "{{instance}}"),),
            width=6,
        ),
    ),
)

ROWS = (FINE, DELIVERED, RETRIED, AT_ENDPOINTS, SEQUENCED, RUNNING)
