"""A panel of the dashboard, and what Grafana wants it to look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["stat", "timeseries", "bargauge", "state-timeline"]

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
HEIGHTS: dict[Kind, int] = {"stat": 4, "timeseries": 8, "bargauge": 8, "state-timeline": 8}
NOW: tuple[Kind, ...] = ("stat", "bargauge")
"""These show what is, and not what was."""

_REDUCED = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_LEGEND = {"displayMode": "list", "placement": "bottom", "showLegend": True}


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    unit: str
    """One of Grafana's."""
    description: str
    targets: tuple[tuple[str, str], ...]
    """Expressions, each with its legend."""
    kind: Kind = "timeseries"
    width: int = 12
    """Of 24."""
    steps: tuple[tuple[float | None, str], ...] = ((None, "green"),)
    """From which value on it has which colour; None: below all others."""
    stacked: bool = False
    decimals: int | None = None

    def as_json(self, panel_id: int, x: int, y: int) -> dict[str, Any]:
        """The panel, at a place of the grid."""
        defaults: dict[str, Any] = {
            "unit": self.unit,
            "noValue": "-",
            "thresholds": {
                "mode": "absolute",
                "steps": [{"color": colour, "value": value} for value, colour in self.steps],
            },
        }
        if self.decimals is not None:
            defaults["decimals"] = self.decimals
        if self.kind in ("stat", "state-timeline") or len(self.steps) > 1:
            defaults["color"] = {"mode": "thresholds"}
        if self.kind in ("timeseries", "bargauge"):
            defaults["min"] = 0
        if self.kind == "timeseries":
            defaults["custom"] = {
                "fillOpacity": 30 if self.stacked else 0,
                "lineWidth": 1,
                "showPoints": "never",
                "stacking": {"group": "A", "mode": "normal" if self.stacked else "none"},
            }
        return {
            "id": panel_id,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": HEIGHTS[self.kind]},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": self._options(),
            "targets": [self._target(n, *target) for n, target in enumerate(self.targets)],
        }

    def _options(self) -> dict[str, Any]:
        match self.kind:
            case "stat":
                return {
                    "reduceOptions": _REDUCED,
                    "colorMode": "background",
                    "graphMode": "none",
                    "textMode": "value",
                }
            case "bargauge":
                return {
                    "reduceOptions": _REDUCED,
                    "orientation": "horizontal",
                    "displayMode": "basic",
                    "valueMode": "text",
                }
            case "state-timeline":
                return {"legend": _LEGEND, "mergeValues": True, "showValue": "never"}
            case "timeseries":
                return {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}}

    def _target(self, n: int, expr: str, legend: str) -> dict[str, Any]:
        now = self.kind in NOW
        return {
            "refId": chr(ord("A") + n),
            "datasource": SOURCE,
            "editorMode": "code",
            "expr": expr,
            "legendFormat": legend,
            "instant": now,
            "range": not now,
        }


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]
