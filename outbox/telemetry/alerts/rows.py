"""Rows and panels of the dashboard, with their PromQL.

`$job` is an installation.  Metrics of the leader are taken from the current leader; counters
of replicas are summed, limited to `$instance` and `$endpoint`.
"""

from __future__ import annotations

from outbox.telemetry.alerts.panel import Panel, PanelRow

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
    """The share of failures.

    Without a failure there may be no series for it: the share is then 0, and there is no value
    only if the total is 0.
    """
    part = f"sum(increase({metric}{{{labels}, {_FAILED}}}[{window}]))"
    whole = f"sum(increase({metric}{{{labels}}}[{window}]))"
    return f"({part} or 0 * {whole}) / ({whole} > 0)"


def _leader(metric: str) -> str:
    """A metric that only the leader reports."""
    return f"{metric}{{{_JOB}}} and on (job, instance) outbox_replica_leads{{{_JOB}}} == 1"


def _top(metric: str, by: str) -> str:
    """The ten endpoints with the highest value."""
    return f"topk(10, max by ({by}) ({metric}{{{_ENDPOINT}}}))"


def _pending(endpoints: str) -> str:
    """The backlog by endpoint; during a hand-over two replicas report the same endpoint."""
    return (
        f'max by (endpoint) (outbox_backlog{{{endpoints}, endpoint!="(other)"}}) or '
        f'sum by (endpoint) (outbox_backlog{{{endpoints}, endpoint="(other)"}})'
    )


_SUCCESS = "1 - " + _failed("outbox_deliveries_total", _ENDPOINT, "1h")
_P95 = _quantile(0.95, "outbox_delivery_latency_seconds", _ENDPOINT, "5m")
_ALL_PENDING = f"sum({_pending(_ENDPOINT)})"
_DEAD = f"max({_leader('outbox_dead_letters')})"

OVERVIEW = PanelRow(
    "Overview",
    (
        Panel(
            "Success rate",
            "percentunit",
            "Share of the deliveries completed in the last hour that were acknowledged. The "
            "others were dead-lettered.",
            ((_SUCCESS, "delivered"),),
            kind="stat",
            width=6,
            steps=((None, "red"), (0.999, "green")),
            decimals=3,
        ),
        Panel(
            "Commit to acknowledgement, p95",
            "s",
            "95th percentile of the last five minutes, from the commit of the event. Excludes "
            "replays and backfills.",
            ((_P95, "p95"),),
            kind="stat",
            width=6,
            steps=((None, "green"), (5, "orange"), (10, "red")),
        ),
        Panel(
            "Backlog",
            "short",
            "Pending deliveries of all endpoints.",
            ((_ALL_PENDING, "pending"),),
            kind="stat",
            width=6,
            steps=((None, "green"), (1000, "orange")),
        ),
        Panel(
            "Dead letters",
            "short",
            "Open dead letters, see outbox dead count. Counted up to 100,000; a range counts as "
            "one.",
            ((_DEAD, "dead letters"),),
            kind="stat",
            width=6,
            steps=((None, "green"), (10, "orange"), (100, "red")),
        ),
        Panel(
            "Commit to acknowledgement",
            "s",
            "Latency of deliveries, from the commit of the event.",
            _quantiles("outbox_delivery_latency_seconds", _ENDPOINT),
        ),
        Panel(
            "Backlog and dead letters",
            "short",
            "Pending deliveries and open dead letters.",
            ((_ALL_PENDING, "pending"), (_DEAD, "dead letters")),
        ),
    ),
)

DELIVERED = PanelRow(
    "Deliveries and attempts",
    (
        Panel(
            "Completed deliveries",
            "cps",
            "By outcome: delivered, or the reason of the dead letter.",
            ((_rate("outbox_deliveries_total", _ENDPOINT, "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Requests",
            "reqps",
            "By outcome: delivered, retry or refused.",
            ((_rate("outbox_attempts_total", _ENDPOINT, "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Failed requests",
            "percentunit",
            "Share of all requests without a successful response.",
            ((_failed("outbox_attempts_total", _ENDPOINT, "$__rate_interval"), "failed"),),
            width=8,
        ),
        Panel(
            "Failed requests by cause",
            "reqps",
            "By the class of the status, or why there was no response.",
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
            "Request duration",
            "s",
            "From the DNS lookup to the response.",
            _quantiles("outbox_attempt_duration_seconds", _ENDPOINT),
            width=8,
        ),
    ),
)

RETRIED = PanelRow(
    "Retries",
    (
        Panel(
            "Retries",
            "reqps",
            "Second and further requests of a delivery, by outcome.",
            ((_rate("outbox_retries_total", _HERE, "outcome"), "{{outcome}}"),),
            width=6,
            stacked=True,
        ),
        Panel(
            "Failed retries",
            "percentunit",
            "Share of the retries of the last 15 minutes that failed again.",
            ((_failed("outbox_retries_total", _HERE, "15m"), "failed"),),
            width=6,
        ),
        Panel(
            "Retry delay",
            "s",
            "Delay before the next attempt after a failed one.",
            _quantiles("outbox_retry_delay_seconds", _HERE),
            width=6,
        ),
        Panel(
            "Requests per delivery",
            "short",
            "Requests until a delivery was acknowledged or dead-lettered.",
            _quantiles("outbox_delivery_attempts", _HERE),
            width=6,
        ),
        Panel(
            "Deliveries in runs",
            "percentunit",
            "Share of the deliveries that the next one of their lane followed at once: those of "
            "backlogs.",
            (
                (
                    f"sum(rate(outbox_run_deliveries_total{{{_HERE}}}[$__rate_interval])) / "
                    f'(sum(rate(outbox_deliveries_total{{{_HERE}, outcome="delivered"}}'
                    "[$__rate_interval])) > 0)",
                    "in runs",
                ),
            ),
            width=6,
        ),
    ),
)

AT_ENDPOINTS = PanelRow(
    "Endpoints",
    (
        Panel(
            "Largest backlogs",
            "short",
            "The ten endpoints with the most pending deliveries, now.",
            ((f"topk(10, {_pending(_ENDPOINT)})", "{{endpoint}}"),),
            kind="bargauge",
            width=8,
        ),
        Panel(
            "Oldest pending deliveries",
            "s",
            "Age of the oldest next delivery of a lane, for the ten endpoints with the oldest "
            "ones, now.",
            ((_top("outbox_lane_head_age_seconds", "endpoint"), "{{endpoint}}"),),
            kind="bargauge",
            width=8,
            steps=((None, "green"), (1800, "orange")),
        ),
        Panel(
            "Unhealthy longest",
            "s",
            "Time since an endpoint was last healthy, now.",
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
            "Pending deliveries of an endpoint's deepest lane, for the ten highest.",
            ((_top("outbox_lane_depth", "endpoint"), "{{endpoint}}"),),
            width=8,
        ),
        Panel(
            "Endpoints",
            "short",
            "By the state of the circuit breaker.",
            ((f"sum by (state) (outbox_endpoints{{{_HERE}}})", "{{state}}"),),
            width=8,
            stacked=True,
        ),
        Panel(
            "Lanes",
            "short",
            "Idle, pending, failing (the next delivery was attempted), or blocked.",
            ((f"sum by (state) (outbox_lanes{{{_HERE}}})", "{{state}}"),),
            width=8,
            stacked=True,
        ),
    ),
)

SEQUENCED = PanelRow(
    "Sequencing",
    (
        Panel(
            "Events",
            "cps",
            "Events that got sequence numbers.",
            ((f"sum(rate(outbox_events_total{{{_HERE}}}[$__rate_interval]))", "events"),),
            width=6,
        ),
        Panel(
            "Lag",
            "s",
            "Time since the sequencer had last read all committed events, up to OUTBOX_POLL_S "
            "while no events are published; and how long no replica could sequence.",
            (
                (f"max({_leader('outbox_relay_lag_seconds')})", "lag"),
                (f"max(outbox_sequencing_stall_seconds{{{_HERE}}})", "stall"),
            ),
            width=6,
        ),
        Panel(
            "Oldest gap",
            "s",
            "Age of the oldest open transaction that publishes. Only its own events wait.",
            ((f"max({_leader('outbox_gap_age_seconds')})", "age"),),
            width=6,
        ),
        Panel(
            "Horizon",
            "s",
            "Age of the oldest transaction that prevents vacuum from removing dead rows.",
            ((f"max({_leader('outbox_horizon_age_seconds')})", "age"),),
            width=6,
        ),
    ),
)

RUNNING = PanelRow(
    "Replicas and process",
    (
        Panel(
            "Leader",
            "short",
            "1: this replica is the leader; 0: it is not.",
            ((f"max by (instance) (outbox_replica_leads{{{_HERE}}})", "{{instance}}"),),
            kind="state-timeline",
            width=8,
            steps=((None, "blue"), (1, "green")),
        ),
        Panel(
            "Replicas",
            "short",
            "Registered replicas. The lease of a lapsed one has expired.",
            ((f"max by (state) ({_leader('outbox_replicas')})", "{{state}}"),),
            width=8,
        ),
        Panel(
            "Losses",
            "short",
            "Replicas that were expired, and sessions that were lost, in five minutes.",
            (
                (
                    f"sum(increase(outbox_replica_losses_total{{{_HERE}}}[5m]))",
                    "expired replicas",
                ),
                (
                    f"sum by (instance) (increase(outbox_session_losses_total{{{_HERE}}}[5m]))",
                    "sessions of {{instance}}",
                ),
            ),
            width=8,
        ),
        Panel(
            "Requests in flight",
            "short",
            "In flight, at most OUTBOX_IN_FLIGHT_MAX per replica, and waiting for admission.",
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
            "Share of one core; the relay uses one.",
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

ROWS = (OVERVIEW, DELIVERED, RETRIED, AT_ENDPOINTS, SEQUENCED, RUNNING)
