"""The Helm chart: its values fit the settings, and Kubernetes accepts what it renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema_rs import ValidationError

from outbox.config import Settings, field_names, load, secret_fields, variable_of
from outbox.errors import CannotRun
from outbox.version import __version__
from tests.support.helm import KUBERNETES, Helm, validate_object

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


@pytest.fixture(scope="session")
def helm() -> Helm:
    try:
        return Helm(CHART)
    except CannotRun as error:
        pytest.skip(str(error))


def _render(helm: Helm, values: dict[str, Any]) -> dict[str, Any]:
    """The rendered objects by their kinds."""
    rendered = helm.render(values)
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


def test_the_defaults_of_the_settings_are_those_of_the_relay() -> None:
    settings = Settings(dsn="postgresql://localhost/x")
    assert _load("values.yaml")["settings"] == {
        "OUTBOX_BUFFER_BYTES_MAX": settings.buffer_bytes_max,
        "OUTBOX_DRAIN_S": settings.drain_s,
    }


@pytest.mark.slow
@pytest.mark.system
def test_the_memory_limit_follows_from_the_buffer(helm: Helm) -> None:
    """It is the formula of the guide, unless the values have another limit."""
    for given, limits in (
        ({}, {"memory": "512Mi"}),
        ({"settings": {"OUTBOX_BUFFER_BYTES_MAX": 1 << 30}}, {"memory": "1408Mi"}),
        ({"settings": {"OUTBOX_ADMIN": "127.0.0.1:8080"}}, {"memory": "768Mi"}),
        ({"resources": {"limits": {"memory": "2Gi", "cpu": 1}}}, {"memory": "2Gi", "cpu": 1}),
    ):
        (container,) = _render(helm, {**MINIMAL, **given})["Deployment"]["spec"]["template"][
            "spec"
        ]["containers"]
        assert container["resources"]["limits"] == limits
        assert container["resources"]["requests"]["memory"] == "128Mi"


def test_the_alert_rules_are_those_of_the_package() -> None:
    assert (CHART / "files/alerts.yml").read_bytes() == ALERTS.read_bytes()


@pytest.mark.full
@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize(
    "version", [pytest.param(KUBERNETES[0], marks=pytest.mark.full), *KUBERNETES[1:]]
)
@pytest.mark.parametrize(
    "values",
    [
        pytest.param(MINIMAL, marks=pytest.mark.full, id="minimal"),
        pytest.param(EVERYTHING, id="all"),
    ],
)
def test_kubernetes_accepts_the_objects(helm: Helm, values: dict[str, Any], version: str) -> None:
    objects = _render(helm, values)
    for kind, each in objects.items():
        if not each["apiVersion"].startswith("monitoring.coreos.com/"):
            validate_object(each, version)
        assert each["metadata"]["name"].startswith("shop"), kind


@pytest.mark.full
def test_an_object_with_an_unknown_field_or_a_wrong_type_is_not_accepted(helm: Helm) -> None:
    service = _render(helm, MINIMAL)["Service"]
    for wrong in ({"clusterIp": "None"}, {"ports": "9090"}):
        with pytest.raises(ValidationError):
            validate_object({**service, "spec": {**service["spec"], **wrong}}, KUBERNETES[-1])


def test_the_oldest_version_that_the_chart_accepts_is_tested() -> None:
    assert _load("Chart.yaml")["kubeVersion"] == f">={KUBERNETES[0]}.0-0"


@pytest.mark.full
def test_the_relay_accepts_the_environment_of_its_container(helm: Helm, tmp_path: Path) -> None:
    (tmp_path / "dsn").write_text("postgresql://localhost/x")
    relay, migration = (
        _render(helm, EVERYTHING)[kind]["spec"]["template"]["spec"]
        for kind in ("Deployment", "Job")
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


@pytest.mark.full
def test_optional_objects_are_left_out(helm: Helm) -> None:
    assert set(_render(helm, MINIMAL)) == {
        *("Deployment", "Job", "NetworkPolicy", "PodDisruptionBudget", "Service")
    }
    rules = _render(helm, EVERYTHING)["PrometheusRule"]["spec"]
    assert rules == yaml.safe_load(ALERTS.read_text())


@pytest.mark.full
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"settings": {"OUTBOX_DRIAN_S": 3}}, "OUTBOX_DRIAN_S"),
        ({"settings": {"OUTBOX_DSN": "postgresql://secret"}}, "OUTBOX_DSN"),
        ({"secret": {"name": ""}}, "name"),
        ({"replicas": "two"}, "replicas"),
    ],
)
def test_a_wrong_value_is_named(helm: Helm, values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        helm.render(values)


@pytest.mark.slow
@pytest.mark.system
def test_lint_finds_no_error(helm: Helm) -> None:
    report = helm.lint(MINIMAL)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []
