"""Panels of the dashboard, in Grafana's JSON model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

PanelKind: TypeAlias = Literal["stat", "timeseries", "bargauge", "state-timeline"]

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
HEIGHTS: dict[PanelKind, int] = {"stat": 4, "timeseries": 8, "bargauge": 8, "state-timeline": 8}
NOW: tuple[PanelKind, ...] = ("stat", "bargauge")
"""Panels that show the current value, not a time series."""

_REDUCED = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_LEGEND = {"displayMode": "list", "placement": "bottom", "showLegend": True}


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of the dashboard."""

    title: str
    unit: str
    """A Grafana unit."""
    description: str
    targets: tuple[tuple[str, str], ...]
    """PromQL expressions with their legends."""
    kind: PanelKind = "timeseries"
    width: int = 12
    """Columns, of 24."""
    steps: tuple[tuple[float | None, str], ...] = ((None, "green"),)
    """Thresholds with their colours; None: the base colour."""
    stacked: bool = False
    decimals: int | None = None

    def as_json(self, panel_id: int, x: int, y: int) -> dict[str, Any]:
        """The panel as JSON, at a position in the grid."""
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
class PanelRow:
    """Panels under one title."""

    title: str
    panels: tuple[Panel, ...]
