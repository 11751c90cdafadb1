"""The dashboard file is complete, consistent, and queries existing metrics."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.promtool import check_expressions
from tests.telemetry.alerts.names import TELEMETRY, exported, wrong

if TYPE_CHECKING:
    from pathlib import Path

DASHBOARD: dict[str, Any] = json.loads((TELEMETRY / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# The Grafana units in use.
UNITS = {"percentunit", "s", "short", "cps", "reqps", "bytes"}


def expressions() -> list[str]:
    """Return the expressions as Prometheus gets them."""
    found = [target["expr"] for panel in PANELS for target in panel["targets"]]
    return [expr.replace("$__rate_interval", "1m") for expr in found]


def test_the_dashboard_requires_grafana_10_or_later() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["title"]
    assert DASHBOARD["uid"]
    # Grafana assigns its own id.
    assert "id" not in DASHBOARD


def test_ids_are_unique() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0


def test_panels_are_in_rows_side_by_side() -> None:
    assert DASHBOARD["panels"][0]["type"] == "row"
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        "Overview",
        "Deliveries and attempts",
        "Retries",
        "Endpoints",
        "Sequencing",
        "Replicas and process",
        "API",
    ]
    places = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert all(x < 24 for x, _ in cells), panel["title"]
        assert not cells & places, panel["title"]
        places |= cells


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_have_all_required_fields(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"] == SOURCE
    for target in panel["targets"]:
        assert target["datasource"] == SOURCE
        assert target["legendFormat"]


def test_panels_of_one_type_differ_only_in_their_content() -> None:
    first: dict[str, dict[str, Any]] = {}
    for panel in PANELS:
        like = first.setdefault(panel["type"], panel)
        assert panel["options"] == like["options"], panel["title"]
        assert panel["gridPos"]["h"] == like["gridPos"]["h"], panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["noValue"] == "-"
        # The base colour has no threshold, and the others are in ascending order.
        base, *steps = [step["value"] for step in defaults["thresholds"]["steps"]]
        assert base is None
        assert steps == sorted(steps)
        assert (defaults.get("color") == {"mode": "thresholds"}) == (
            bool(steps) or panel["type"] in ("stat", "state-timeline")
        ), panel["title"]
        # These types show the current value, the others a time series.
        now = panel["type"] in ("stat", "bargauge")
        for target in panel["targets"]:
            assert (target["instant"], target["range"]) == (now, not now), panel["title"]


def test_the_data_source_is_a_variable() -> None:
    assert list(VARIABLES) == ["datasource", "job", "instance", "endpoint"]
    assert VARIABLES["datasource"]["type"] == "datasource"
    for name in ("job", "instance", "endpoint"):
        variable = VARIABLES[name]
        assert variable["datasource"] == SOURCE
        query = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert query is not None
        assert query[2] == name
        (metric,) = exported().keys() & {query[1].partition("{")[0]}
        assert name in exported()[metric]
        assert list(wrong(query[1], exported())) == []
    for expression in expressions():
        assert 'job="$job"' in expression
        assert set(re.findall(r"\$(\w+)", expression)) <= VARIABLES.keys()


def test_the_dashboard_queries_existing_metrics() -> None:
    for expression in expressions():
        assert list(wrong(expression, exported())) == [], expression
    legends = {t["legendFormat"] for p in PANELS for t in p["targets"]}
    for label in re.findall(r"\{\{(\w+)\}\}", " ".join(legends)):
        assert any(label in labels for labels in exported().values())


def test_every_metric_is_shown() -> None:
    shown = " ".join(expressions())
    for name in exported().keys() - {"up", "process_start_time_seconds"}:
        family = re.sub(r"_(bucket|count|sum)$", "", name)
        assert re.search(rf"\b{family}(_bucket)?\b", shown), name


@pytest.mark.promtool
def test_every_expression_is_promql(tmp_path: Path) -> None:
    content, output = check_expressions(expressions(), tmp_path)
    assert content, output
    assert f"{len(expressions())} rules found" in output
