"""Grafana dashboard; regenerate it with
`python -m outbox.telemetry.alerts.dashboard > outbox/telemetry/alerts/dashboard.json`.

It is generated, because ids, positions and data sources are repeated in every panel.
"""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from outbox.telemetry.alerts.panel import SOURCE, PanelRow
from outbox.telemetry.alerts.rows import ROWS

COLUMNS = 24
SCHEMA_VERSION = 39
"""The schema of Grafana 10.4; later versions migrate it when they load it."""


def dashboard(rows: tuple[PanelRow, ...] = ROWS) -> dict[str, Any]:
    """The dashboard in Grafana's JSON model."""
    return {
        "uid": "outbox-relay",
        "title": "outbox relay",
        "description": "Health and performance of outbox relay.",
        "tags": ["outbox"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "refresh": 1,
                },
                _variable("job", "Installation", "outbox_events_total"),
                _variable("instance", "Replica", 'outbox_events_total{job="$job"}', several=True),
                _variable(
                    "endpoint", "Endpoint", 'outbox_deliveries_total{job="$job"}', several=True
                ),
            ]
        },
        "panels": _panels(rows),
    }


def _variable(label: str, title: str, metric: str, *, several: bool = False) -> dict[str, Any]:
    """A dashboard variable with the values of a label."""
    query = f"label_values({metric}, {label})"
    variable: dict[str, Any] = {
        "name": label,
        "label": title,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "values"},
        # Also refresh when the time range changes, because values differ over time.
        "refresh": 2,
        "sort": 1,
        "multi": several,
        "includeAll": several,
    }
    if several:
        everything = {"selected": True, "text": ["All"], "value": ["$__all"]}
        # A regex instead of the list of all values, which may be too long for a request.
        variable |= {"allValue": ".*", "current": everything}
    return variable


def _panels(rows: tuple[PanelRow, ...]) -> list[dict[str, Any]]:
    ids = count(1)
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        panels.append(
            {
                "id": next(ids),
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x = height = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            placed = panel.as_json(next(ids), x, y)
            panels.append(placed)
            x, height = x + panel.width, max(height, placed["gridPos"]["h"])
        y += height
    return panels


def text() -> str:
    """The content of `dashboard.json`."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(text(), end="")  # noqa: T201 (a command-line script)
