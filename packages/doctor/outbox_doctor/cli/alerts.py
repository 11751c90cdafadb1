"""`outbox alerts`: Prometheus alert rules and a Grafana dashboard."""

from __future__ import annotations

from importlib.resources import files

import click

FILES = {"rules": "alerts.yml", "dashboard": "dashboard.json"}
"""Files of `outbox.telemetry`, on the metrics of `outbox.telemetry.catalogue`."""


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

Start each relay with --health. Scrape all relays of one database and schema under one
job; the job label identifies the installation. In Kubernetes, use the rules as the spec
of a PrometheusRule, and set honorLabels: true in the ServiceMonitor or PodMonitor,
because the metrics have their own label "endpoint".

Grafana 10 or later: import the dashboard under Dashboards, New, Import, or provision the
file. Select the data source at the top of the dashboard.

Adjust the thresholds as needed. Each alert's annotation "runbook" names the command that
shows the details.
"""
)
@click.argument("which", type=click.Choice(list(FILES)))
def command(which: str) -> None:
    """Print Prometheus alert rules or a Grafana dashboard for the relay's metrics.

    Needs no database.
    """
    click.echo(files("outbox.telemetry").joinpath(FILES[which]).read_bytes(), nl=False)  # noqa: TID251 (our own file)
