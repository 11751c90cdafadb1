"""Prometheus and Grafana of compose.yaml: their files fit together and the relay's metrics."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from outbox_devtools.development_receiver import DevelopmentReceiver
from tests.support.checkout import ROOT
from tests.support.ports import free_port
from tests.support.process import relay_process
from tests.support.prometheus import prometheus
from tests.support.promtool import run_promtool
from tests.support.relay import add_endpoint, all_ended, publish
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database
    from tests.support.prometheus import Prometheus

COMPOSE = ROOT / "deploy/compose.yaml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
PROFILE = "monitoring"
WITHOUT_DATA = {
    *("Failed requests", "Failed requests by cause", "Failed retries", "Unhealthy longest"),
    "Deliveries in runs",
    *("API requests", "API request duration", "Refused API requests", "API processes"),
}
"""Panels that show nothing while every delivery succeeds, there is no backlog and no API."""


def _mounted(service: str) -> dict[str, Path]:
    """The files of this repository that a service reads, by their paths in the container."""
    mounts = (volume.split(":") for volume in SERVICES[service]["volumes"])
    found = {}
    for source, target, mode in mounts:
        assert mode == "ro"
        found[target] = (COMPOSE.parent / source).resolve(strict=True)
    return found


def _only(service: str, folder: str) -> Any:
    """The content of the one file in a folder of the container."""
    (file,) = (path for target, path in _mounted(service).items() if target.startswith(folder))
    return yaml.safe_load(file.read_text())


def _settings(tmp_path: Path) -> Path:
    """Prometheus' configuration, with the files that it names, as in the container."""
    for target, path in _mounted("prometheus").items():
        assert target.startswith("/etc/prometheus/")
        shutil.copy(path, tmp_path / Path(target).name)
    return tmp_path / "prometheus.yml"


def _dashboard() -> dict[str, Any]:
    dashboard: dict[str, Any] = _only("grafana", "/etc/grafana/dashboards/")
    return dashboard


def test_a_composition_without_the_profile_has_no_monitoring() -> None:
    optional = {name for name, each in SERVICES.items() if PROFILE in each.get("profiles", ())}
    assert optional == {"prometheus", "grafana"}
    assert all(SERVICES[name]["profiles"] == [PROFILE] for name in optional)


def test_monitoring_is_published_on_loopback_only() -> None:
    for service in SERVICES.values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")


def test_prometheus_scrapes_every_relay_and_api() -> None:
    (job,) = _only("prometheus", "/etc/prometheus/prometheus.yml")["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    assert discovery["names"] == ["relay", "api"]
    assert {"relay", "api"} <= set(SERVICES)
    exposed = re.search(r"OUTBOX_HEALTH=0\.0\.0\.0:(\d+)", (ROOT / "deploy/Dockerfile").read_text())
    assert exposed is not None
    assert (discovery["type"], discovery["port"]) == ("A", int(exposed[1]))


@pytest.mark.promtool
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    accepted, output = run_promtool("check", "config", _settings(tmp_path))
    assert accepted, output
    assert "1 rule files found" in output


@pytest.mark.slow
def test_grafana_finds_the_data_source_and_the_dashboard() -> None:
    (source,) = _only("grafana", "/etc/grafana/provisioning/datasources/")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"] is True
    (variable,) = (v for v in _dashboard()["templating"]["list"] if v["name"] == "datasource")
    assert (variable["type"], variable["query"]) == ("datasource", source["type"])
    (provider,) = _only("grafana", "/etc/grafana/provisioning/dashboards/")["providers"]
    folder = Path(provider["options"]["path"])
    shown = [Path(target) for target in _mounted("grafana") if Path(target).parent == folder]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert [str(each) for each in shown] == [home]


@pytest.mark.full
@pytest.mark.one_major
async def test_prometheus_scrapes_a_relay_and_evaluates_the_rules_and_the_dashboard(
    database: Database, tmp_path: Path
) -> None:
    settings, port = _settings(tmp_path), free_port()
    content = yaml.safe_load(settings.read_text())
    # There is no DNS of a container network here, and a test does not wait for 15 s.
    (job,) = content["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    content["global"] = dict.fromkeys(content["global"], "1s")
    settings.write_text(json.dumps(content))
    env = {"OUTBOX_DSN": database.dsn, "OUTBOX_HEALTH": f"127.0.0.1:{port}"}
    async with (
        DevelopmentReceiver().serve() as url,
        relay_process(env, tmp_path / "relay.log") as relay,
        prometheus(settings) as server,
    ):
        await add_endpoint(database, "shop", url=url)
        await publish(database, 1)
        await all_ended(database)
        await until(lambda: _health(server, "up"), what="the relay to be scraped")
        # Rates need an earlier sample.
        await publish(database, 2, 3)
        delivered = 'outbox_deliveries_total{job="outbox",endpoint="shop",outcome="delivered"}'
        await until(lambda: _shows(server, f"{delivered} == 3"), what="the deliveries")
        await until(lambda: _are_evaluated(server), what="the rules to be evaluated")
        for panel in _panels():
            if panel["title"] not in WITHOUT_DATA:
                await until(lambda panel=panel: _has_data(server, panel), what=panel["title"])
        assert await relay.end() == 0
        await until(lambda: _health(server, "down"), what="the relay to be missed")


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in _dashboard()["panels"] if panel["type"] != "row"]


async def _shows(server: Prometheus, expression: str) -> bool:
    """Whether an expression has a value now; Prometheus must accept it."""
    return bool((await server.get("query", query=expression))["result"])


async def _has_data(server: Prometheus, panel: dict[str, Any]) -> bool:
    """Whether a query of the panel has a value, as Grafana sends it."""
    values = {"$__rate_interval": "1m", "$job": "outbox", "$instance": ".*", "$endpoint": ".*"}
    found = False
    for target in panel["targets"]:
        expression = target["expr"]
        for variable, value in values.items():
            expression = expression.replace(variable, value)
        found = await _shows(server, expression) or found
    return found


async def _health(server: Prometheus, expected: str) -> bool:
    targets = (await server.get("targets"))["activeTargets"]
    return [each["health"] for each in targets] == [expected]


async def _are_evaluated(server: Prometheus) -> bool:
    groups = (await server.get("rules"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [rule for rule in rules if rule["health"] == "err"] == []
    shipped = yaml.safe_load(_mounted("prometheus")["/etc/prometheus/outbox.yml"].read_text())
    assert len(rules) == sum(len(group["rules"]) for group in shipped["groups"])
    return all(rule["health"] == "ok" for rule in rules)
