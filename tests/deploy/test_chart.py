"""The Helm chart: its values fit the settings, and Kubernetes accepts what it renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from outbox.config import Settings, field_names, load, secret_fields, variable_of
from outbox.version import __version__

CHART = Path(__file__).parents[2] / "deploy/helm/outbox-relay"
ALERTS = Path(__file__).parents[2] / "outbox/telemetry/alerts.yml"
SET_BY_THE_CHART = {"health"}

MINIMAL: dict[str, Any] = {}
EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.example/outbox", "tag": "1", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "replicas": 3,
    "secret": {"name": "outbox", "keys": {"OUTBOX_DSN": "dsn", "OUTBOX_KEY": "key"}},
    "settings": {
        "OUTBOX_DRAIN_S": 29.5,
        "OUTBOX_BATCH_DELIVERIES_MAX": 1000000,
        "OUTBOX_NOTIFY": False,
    },
    "extraEnv": [{"name": "SSL_CERT_FILE", "value": "/run/secrets/outbox/ca"}],
    "podAnnotations": {"example.com/team": "shop"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"operator": "Exists"}],
    "networkPolicy": {"from": [{"podSelector": {}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
}


def _load(name: str) -> Any:
    return yaml.safe_load((CHART / name).read_text())


def _render(values: dict[str, Any]) -> dict[str, Any]:
    """The rendered objects by their kinds."""
    chart = pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed")
    rendered = chart.Chart.load(CHART).render(values, name="shop", namespace="shop")
    notes = "outbox-relay/templates/NOTES.txt"
    manifests = [text for path, text in rendered.items() if path != notes]
    objects = [each for text in manifests for each in yaml.safe_load_all(text) if each]
    return {each["kind"]: each for each in objects}


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = _load("Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_the_chart_accepts_each_setting_and_no_other() -> None:
    properties = json.loads((CHART / "values.schema.json").read_text())["properties"]
    secrets = set(secret_fields())
    others = set(field_names().values()) - secrets - SET_BY_THE_CHART
    accepted = properties["settings"]["properties"], properties["secret"]["properties"]["keys"]
    assert set(accepted[0]) == {variable_of(name) for name in others}
    assert set(accepted[1]["properties"]) == {variable_of(name) for name in secrets}


def test_the_default_of_the_graceful_shutdown_is_that_of_the_relay() -> None:
    drain_s = Settings(dsn="postgresql://localhost/x").drain_s
    assert _load("values.yaml")["settings"] == {"OUTBOX_DRAIN_S": drain_s}


def test_the_alert_rules_are_those_of_the_package() -> None:
    assert (CHART / "files/alerts.yml").read_bytes() == ALERTS.read_bytes()


@pytest.mark.parametrize("values", [MINIMAL, EVERYTHING], ids=["minimal", "everything"])
def test_kubernetes_accepts_the_objects(values: dict[str, Any]) -> None:
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    objects = _render(values)
    for kind, each in objects.items():
        if not each["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes.validate(each, kubernetes.latest_version(), strict=True)
        assert each["metadata"]["name"].startswith("shop"), kind


def test_the_relay_accepts_the_environment_of_its_container(tmp_path: Path) -> None:
    (tmp_path / "dsn").write_text("postgresql://localhost/x")
    relay, migration = (
        _render(EVERYTHING)[kind]["spec"]["template"]["spec"] for kind in ("Deployment", "Job")
    )
    (container,) = relay["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert migration["containers"][0]["env"] == container["env"]
    env["OUTBOX_DSN_FILE"] = str(tmp_path / "dsn")
    del env["OUTBOX_KEY_FILE"]
    settings = load(env=env)
    assert settings.health is not None
    assert (settings.drain_s, settings.batch_deliveries_max, settings.notify) == (
        29.5,
        1000000,
        False,
    )
    assert relay["terminationGracePeriodSeconds"] > settings.drain_s
    for pod in (relay, migration):
        assert pod["enableServiceLinks"] is False, "OUTBOX_RELAY_PORT would be an unknown setting"


def test_optional_objects_are_left_out() -> None:
    assert set(_render(MINIMAL)) == {
        *("Deployment", "Job", "NetworkPolicy", "PodDisruptionBudget", "Service")
    }
    rules = _render(EVERYTHING)["PrometheusRule"]["spec"]
    assert rules == yaml.safe_load(ALERTS.read_text())


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"settings": {"OUTBOX_DRIAN_S": 3}}, "OUTBOX_DRIAN_S"),
        ({"settings": {"OUTBOX_DSN": "postgresql://secret"}}, "OUTBOX_DSN"),
        ({"secret": {"name": ""}}, "name"),
        ({"replicas": "two"}, "replicas"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], named: str) -> None:
    chart = pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed")
    with pytest.raises(Exception, match=named):
        chart.Chart.load(CHART).validate_schema(values)


def test_lint_finds_no_error() -> None:
    chart = pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed")
    report = chart.lint(CHART, strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []
