"""`outbox alerts`."""

from __future__ import annotations

import click

from outbox.telemetry import alerts


@click.command(
    epilog="""\b
Examples:
  outbox alerts rules > /etc/prometheus/outbox.yml
  outbox alerts dashboard > outbox-dashboard.json

\b
Prometheus, 2.42 or later, in prometheus.yml:
  rule_files: [outbox.yml]
  scrape_configs:
    - job_name: outbox-shop               # one for each installation
      static_configs:
        - targets: ["relay-1:9090", "relay-2:9090"]

Each relay runs with --health, and all that work beside one database and schema are
scraped under one job: it tells installations apart. In Kubernetes the rules are the
spec of a PrometheusRule, and the ServiceMonitor or PodMonitor says honorLabels: true,
since the metrics have a label "endpoint" of their own.

Grafana, 10 or later: Dashboards, New, Import, and paste the dashboard; or put the file
where a dashboard provider looks. The data source is chosen at the top.

Thresholds are yours to change; each alert's annotation "runbook" names the command that
tells more.
"""
)
@click.argument("which", type=click.Choice(list(alerts.FILES)))
def command(which: str) -> None:
    """Print alerts for Prometheus, or a dashboard for Grafana.

    They are for the metrics of outbox relay, and need no database.
    """
    click.echo(alerts.read(which), nl=False)
