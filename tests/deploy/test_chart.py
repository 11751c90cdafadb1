"""The Helm chart: its values fit the settings, and Kubernetes accepts what it renders."""

from __future__ import annotations

import json
import shutil
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema_rs import ValidationError

from outbox.config import (
    Process,
    Settings,
    field_names,
    load,
    readers_of,
    secret_fields,
    variable_of,
)
from outbox.errors import CannotRun
from outbox.store.privileges import PURPOSES
from outbox.version import __version__
from tests.support.cluster import objects_of
from tests.support.helm import KUBERNETES, Helm, validate_object

pytestmark = pytest.mark.together("chart")

CHART = Path(__file__).parents[2] / "deploy/helm/outbox-relay"
ALERTS = Path(__file__).parents[2] / "outbox/telemetry/alerts.yml"
SET_BY_THE_CHART = {"dsn", "api_dsn", "health", "admin", "receivers"}
WORKLOADS = {
    "relay": ("Deployment", "shop"),
    "api": ("Deployment", "shop-api"),
    "migration": ("Job", "shop-migrate"),
    "apply": ("Job", "shop-apply"),
}
"""The kind and the name of each workload, by its section of the values."""

MINIMAL: dict[str, Any] = {}
EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.example/outbox", "tag": "1", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "secret": {"name": "shared", "keys": {"OUTBOX_KEY": "key", "OUTBOX_PROXY": "proxy"}},
    "settings": {
        "OUTBOX_DRAIN_S": 29.5,
        "OUTBOX_BATCH_DELIVERIES_MAX": 1000000,
        "OUTBOX_NOTIFY": False,
    },
    "migration": {
        "dsn": {"secret": "owner", "key": "dsn"},
        "roles": {purpose: [f"a_{purpose}", f"b {purpose}"] for purpose in PURPOSES},
        "serviceAccountName": "proxy",
    },
    "relay": {
        "replicas": 3,
        "nodeSelector": {"example.com/fast": "yes"},
        "priorityClassName": "high",
        "topologySpreadConstraints": [
            {
                "topologyKey": "example.com/rack",
                "maxSkew": 2,
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"example.com/team": "shop"}},
            }
        ],
    },
    "api": {
        "replicas": 2,
        "admin": {"ingress": {"enabled": True, "host": "outbox.example", "tlsSecret": "tls"}},
        "receivers": {
            "enabled": True,
            "port": 8443,
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "annotations": {"example.com/x": "1"},
                "host": "receivers.example",
            },
        },
    },
    "apply": {"file": "endpoints:\n  - {name: shop, url: 'https://shop.example/'}\n"},
    "podLabels": {"example.com/team": "shop"},
    "podAnnotations": {"example.com/team": "shop"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "low",
    "extraEnv": [{"name": "SSL_CERT_FILE", "value": "/etc/ca/ca.pem"}],
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
    "labels": {"example.com/owner": "platform"},
    "serviceAccount": {"name": "outbox", "annotations": {"example.com/role": "r"}},
    "networkPolicy": {"from": [{"podSelector": {}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
}

Objects = dict[tuple[str, str], dict[str, Any]]
"""Rendered objects by kind and name."""


def _load(name: str) -> Any:
    return yaml.safe_load((CHART / name).read_text())


@pytest.fixture(scope="session")
def helm() -> Helm:
    try:
        return Helm(CHART)
    except CannotRun as error:
        pytest.skip(str(error))


def _render(helm: Helm, values: dict[str, Any]) -> Objects:
    return {
        (each["kind"], each["metadata"]["name"]): each for each in objects_of(helm.render(values))
    }


@pytest.fixture(scope="session")
def minimal(helm: Helm) -> Objects:
    return _render(helm, MINIMAL)


@pytest.fixture(scope="session")
def everything(helm: Helm) -> Objects:
    return _render(helm, EVERYTHING)


def _pod(objects: Objects, workload: str) -> dict[str, Any]:
    """The template of a workload's pods."""
    template: dict[str, Any] = objects[WORKLOADS[workload]]["spec"]["template"]
    return template


def _container(objects: Objects, workload: str) -> dict[str, Any]:
    (container,) = _pod(objects, workload)["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def _files(objects: Objects, workload: str) -> set[tuple[str, str, str]]:
    """The Secret, the key and the variable of each secret file of a workload."""
    (volume,) = [
        each for each in _pod(objects, workload)["spec"]["volumes"] if each["name"] == "secrets"
    ]
    return {
        (source["secret"]["name"], item["key"], item["path"])
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = _load("Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_the_chart_accepts_each_setting_of_its_processes_and_no_other() -> None:
    properties = json.loads((CHART / "values.schema.json").read_text())["properties"]
    serving = {
        name
        for name in set(field_names().values()) - SET_BY_THE_CHART
        if {Process.RELAY, Process.API} & {*readers_of(Settings.model_fields[name])}
    }
    secrets = serving & {*secret_fields()}
    accepted = properties["settings"]["properties"], properties["secret"]["properties"]["keys"]
    assert set(accepted[0]) == {variable_of(name) for name in serving - secrets}
    assert set(accepted[1]["properties"]) == {variable_of(name) for name in secrets}
    assert set(properties["migration"]["properties"]["roles"]["properties"]) == set(PURPOSES)


def test_the_defaults_of_the_settings_are_those_of_the_relay() -> None:
    settings = Settings(dsn="postgresql://localhost/x")
    assert _load("values.yaml")["settings"] == {
        "OUTBOX_BUFFER_BYTES_MAX": settings.buffer_bytes_max,
        "OUTBOX_DRAIN_S": settings.drain_s,
    }


@pytest.mark.slow
@pytest.mark.system
def test_each_pod_but_that_which_creates_the_roles_has_one_address(minimal: Objects) -> None:
    key = ("outbox", "key", "OUTBOX_KEY")
    roles = {("outbox", "relay-dsn", "relay"), ("outbox", "api-dsn", "api")}
    assert _files(minimal, "migration") == {("outbox", "migration-dsn", "OUTBOX_DSN"), *roles}
    assert _files(minimal, "relay") == {("outbox", "relay-dsn", "OUTBOX_DSN"), key}
    assert _files(minimal, "api") == {("outbox", "api-dsn", "OUTBOX_DSN"), key}
    for workload in ("migration", "relay", "api"):
        spec = _pod(minimal, workload)["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "OUTBOX_RELAY_PORT would be an unknown setting"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert _container(minimal, workload)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.slow
@pytest.mark.system
def test_the_memory_limit_of_a_relay_follows_from_the_buffer(helm: Helm, minimal: Objects) -> None:
    """It is the formula of the guide, unless the values have another limit."""
    resources = _container(minimal, "relay")["resources"]
    assert resources == {
        "requests": {"cpu": "100m", "memory": "128Mi"},
        "limits": {"memory": "512Mi"},
    }
    larger = _render(helm, {"settings": {"OUTBOX_BUFFER_BYTES_MAX": 1 << 30}})
    assert _container(larger, "relay")["resources"]["limits"] == {"memory": "1856Mi"}
    assert _container(larger, "api")["resources"]["limits"] == {"memory": "256Mi"}
    chosen = _render(helm, {"relay": {"resources": {"limits": {"memory": "2Gi", "cpu": 1}}}})
    assert _container(chosen, "relay")["resources"]["limits"] == {"memory": "2Gi", "cpu": 1}


def test_the_alert_rules_are_those_of_the_package() -> None:
    assert (CHART / "files/alerts.yml").read_bytes() == ALERTS.read_bytes()


@pytest.mark.full
@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", ["minimal", "everything"])
def test_kubernetes_accepts_the_objects(
    values: str, version: str, request: pytest.FixtureRequest
) -> None:
    objects: Objects = request.getfixturevalue(values)
    for (kind, name), each in objects.items():
        if not each["apiVersion"].startswith("monitoring.coreos.com/"):
            validate_object(each, version)
        assert name.startswith(("shop", "outbox")), kind


@pytest.mark.full
def test_an_object_with_an_unknown_field_or_a_wrong_type_is_not_accepted(
    minimal: Objects,
) -> None:
    service = minimal["Service", "shop"]
    for wrong in ({"clusterIp": "None"}, {"ports": "9090"}):
        with pytest.raises(ValidationError):
            validate_object({**service, "spec": {**service["spec"], **wrong}}, KUBERNETES[-1])


def test_the_oldest_version_that_the_chart_accepts_is_tested() -> None:
    assert _load("Chart.yaml")["kubeVersion"] == f">={KUBERNETES[0]}.0-0"


@pytest.mark.full
@pytest.mark.parametrize("workload", WORKLOADS)
def test_each_process_accepts_the_environment_of_its_container(
    workload: str, everything: Objects, tmp_path: Path
) -> None:
    (tmp_path / "OUTBOX_DSN").write_text("postgresql://localhost/x")
    (tmp_path / "OUTBOX_PROXY").write_text("http://proxy.example:3128")
    env = {each["name"]: each["value"] for each in _container(everything, workload)["env"]}
    env = {name: v.replace("/run/secrets/outbox", str(tmp_path)) for name, v in env.items()}
    env.pop("OUTBOX_KEY_FILE", None)
    settings = load(env=env)
    assert env["SSL_CERT_FILE"] == "/etc/ca/ca.pem"
    assert (settings.drain_s, settings.batch_deliveries_max, settings.notify) == (
        29.5,
        1000000,
        False,
    )
    listeners = {"relay": (9090, None, None), "api": (9090, 8080, 8443)}
    addresses = (settings.health, settings.admin, settings.receivers)
    ports = tuple(each and each.port for each in addresses)
    assert ports == listeners.get(workload, (None, None, None))
    if workload == "relay":
        grace_s = _pod(everything, workload)["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > settings.drain_s


@pytest.mark.full
def test_the_migration_grants_the_roles_of_the_values(everything: Objects) -> None:
    migration = _container(everything, "migration")
    assert migration["args"][0] == "migrate"
    created = ("relay", "api", "operator")
    assert set(migration["args"][1:]) == {
        *(
            f"--{purpose}={role}"
            for purpose in PURPOSES
            for role in (f"a_{purpose}", f"b {purpose}")
        ),
        *(f"--create-role={purpose}=/run/secrets/outbox/{purpose}" for purpose in created),
    }
    addresses = {("shared", f"{purpose}-dsn", purpose) for purpose in created}
    assert _files(everything, "migration") == {("owner", "dsn", "OUTBOX_DSN"), *addresses}


@pytest.mark.full
@pytest.mark.parametrize(
    "migration", [{"createRoles": False}, {"dsn": {"secret": "", "key": "relay-dsn"}}]
)
def test_no_role_is_created_where_that_is_off_or_all_have_one(
    helm: Helm, migration: dict[str, Any]
) -> None:
    api = {"dsn": {"secret": "outbox", "key": "relay-dsn"}}
    objects = _render(helm, {"migration": migration, "api": api})
    assert _container(objects, "migration")["args"] == ["migrate"]
    assert len(_files(objects, "migration")) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("values", "source"),
    [
        ({"file": "endpoints: []\n"}, {"configMap": {"name": "shop-endpoints"}}),
        ({"configMap": "mine"}, {"configMap": {"name": "mine"}}),
        ({"secret": "mine"}, {"secret": {"secretName": "mine", "defaultMode": 0o440}}),
    ],
)
def test_endpoints_are_applied_after_each_change_from_one_place(
    helm: Helm, values: dict[str, str], source: dict[str, Any]
) -> None:
    objects = _render(helm, {"apply": {**values, "prune": True}})
    hooks = objects[WORKLOADS["apply"]]["metadata"]["annotations"]["helm.sh/hook"]
    assert hooks.split(",") == ["post-install", "post-upgrade", "post-rollback"]
    container, volumes = _container(objects, "apply"), _pod(objects, "apply")["spec"]["volumes"]
    assert volumes[1] == {"name": "endpoints", **source}
    mount = container["volumeMounts"][1]
    assert container["args"] == [
        "apply",
        f"--file={mount['mountPath']}/endpoints.yaml",
        "--hide-secrets",
        "--prune",
    ]
    made = {name for kind, name in objects if kind == "ConfigMap"}
    assert made == ({"shop-endpoints"} if "file" in values else set())
    if made:
        data = objects["ConfigMap", "shop-endpoints"]["data"]
        assert data == {"endpoints.yaml": values["file"]}


@pytest.mark.full
def test_values_of_all_pods_reach_each_of_them_and_its_own_come_first(
    everything: Objects,
) -> None:
    for workload in WORKLOADS:
        pod = _pod(everything, workload)
        spec = pod["spec"]
        assert pod["metadata"]["labels"]["example.com/team"] == "shop"
        assert pod["metadata"]["annotations"] == {"example.com/team": "shop"}
        assert spec["tolerations"] == EVERYTHING["tolerations"]
        assert spec["affinity"] == EVERYTHING["affinity"]
        assert spec["imagePullSecrets"] == EVERYTHING["imagePullSecrets"]
        assert spec["volumes"][-1]["name"] == "ca"
        own = workload == "relay"
        fast = {"example.com/fast": "yes"} if own else {}
        assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"} | fast
        assert spec["priorityClassName"] == ("high" if own else "low")
        spread = spec["topologySpreadConstraints"]
        assert [each["topologyKey"] for each in spread] == (
            ["example.com/rack"]
            if own
            else ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
        )
        account = "proxy" if workload == "migration" else "outbox"
        assert spec["serviceAccountName"] == account
        assert _container(everything, workload)["volumeMounts"][-1]["mountPath"] == "/etc/ca"
    constraint = EVERYTHING["relay"]["topologySpreadConstraints"][0]
    assert _pod(everything, "relay")["spec"]["topologySpreadConstraints"] == [constraint]
    spread = _pod(everything, "api")["spec"]["topologySpreadConstraints"]
    assert all(
        _selects(each["labelSelector"]["matchLabels"], everything) == {"api"} for each in spread
    )
    for each in everything.values():
        assert each["metadata"]["labels"]["example.com/owner"] == "platform"


def _selects(labels: dict[str, str], objects: Objects) -> set[str]:
    """The workloads whose pods have these labels."""
    return {
        workload
        for workload in WORKLOADS
        if WORKLOADS[workload] in objects
        and labels.items() <= _pod(objects, workload)["metadata"]["labels"].items()
    }


@pytest.mark.slow
@pytest.mark.system
def test_each_object_selects_the_pods_of_one_deployment(everything: Objects) -> None:
    """A Job's pod is not behind a Service, and no Deployment adopts the pods of another."""
    for kind, path in (
        ("Deployment", ("selector", "matchLabels")),
        ("Service", ("selector",)),
        ("PodDisruptionBudget", ("selector", "matchLabels")),
        ("NetworkPolicy", ("podSelector", "matchLabels")),
    ):
        found = {
            name: _selects(reduce(getitem, path, each["spec"]), everything)
            for (its, name), each in everything.items()
            if its == kind
        }
        assert found == {"shop": {"relay"}, "shop-api": {"api"}}, kind


@pytest.mark.full
def test_listeners_of_the_api_are_reached_as_the_values_say(
    helm: Helm, minimal: Objects, everything: Objects
) -> None:
    ports = {each["name"]: each["port"] for each in minimal["Service", "shop-api"]["spec"]["ports"]}
    assert ports == {"health": 9090, "admin": 8080}
    (health, admin) = minimal["NetworkPolicy", "shop-api"]["spec"]["ingress"]
    assert health == {"ports": [{"port": "health"}]}
    assert admin == {"ports": [{"port": "admin"}], "from": [{"podSelector": {}}]}
    assert [kind for kind, _ in minimal if kind == "Ingress"] == []
    receivers = everything["Ingress", "shop-api-receivers"]["spec"]
    assert receivers["ingressClassName"] == "nginx"
    assert "tls" not in receivers
    (rule,) = receivers["rules"]
    assert rule["host"] == "receivers.example"
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": "shop-api", "port": {"name": "receivers"}}
    admin = everything["Ingress", "shop-api-admin"]["spec"]
    assert admin["tls"] == [{"hosts": ["outbox.example"], "secretName": "tls"}]
    without = _render(helm, {"api": {"admin": {"enabled": False}}})
    assert [name for _, name in without if "api" in name] == []


@pytest.mark.full
def test_metrics_of_relays_and_api_are_scraped(everything: Objects) -> None:
    spec = everything["ServiceMonitor", "shop"]["spec"]
    labels = spec["selector"]["matchLabels"].items()
    services = {
        name: {port["name"] for port in each["spec"]["ports"]}
        for (kind, name), each in everything.items()
        if kind == "Service" and labels <= each["metadata"]["labels"].items()
    }
    assert set(services) == {"shop", "shop-api"}
    (endpoint,) = spec["endpoints"]
    assert all(endpoint["port"] in ports for ports in services.values())
    rules = everything["PrometheusRule", "shop"]["spec"]
    assert rules == yaml.safe_load(ALERTS.read_text())


@pytest.mark.full
def test_optional_objects_are_left_out(helm: Helm, minimal: Objects) -> None:
    assert {kind for kind, _ in minimal} == {
        *("Deployment", "Job", "NetworkPolicy", "PodDisruptionBudget", "Service"),
        "ServiceAccount",
    }
    off = {"enabled": False}
    least = _render(
        helm,
        {
            "migration": off,
            "api": {"admin": off},
            "networkPolicy": off,
            "podDisruptionBudget": off,
            "serviceAccount": {"create": False},
        },
    )
    assert set(least) == {("Deployment", "shop"), ("Service", "shop")}
    assert _pod(least, "relay")["spec"]["serviceAccountName"] == "default"


@pytest.mark.full
def test_a_changed_secret_restarts_pods_and_a_missing_key_is_named(
    helm: Helm, tmp_path: Path
) -> None:
    """An upgrade restarts the pods of a Secret that has changed, and a missing key is named.

    There is no cluster, so the Secrets are put into a copy of the chart.
    """
    keys = dict.fromkeys(("dsn", "key", "relay-dsn", "api-dsn"), "")
    secrets = {
        name: {"metadata": {"resourceVersion": version}, "data": keys}
        for name, version in (("outbox", "7"), ("mine", "8"))
    }
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    helpers = chart / "templates/_helpers.tpl"
    text, lookup = helpers.read_text(), 'lookup "v1" "Secret" $.root.Release.Namespace'
    assert lookup in text
    helpers.write_text(text.replace(lookup, f"get (fromJson `{json.dumps(secrets)}`)"))
    copy = type(helm)(chart)
    objects = _render(copy, {"migration": {"dsn": {"secret": "mine", "key": "dsn"}}})
    for workload, version in (("migration", "8,7"), ("relay", "7"), ("api", "7")):
        annotations = _pod(objects, workload)["metadata"]["annotations"]
        assert annotations == {"outbox-relay/secret-versions": version}
    with pytest.raises(ValueError, match='the Secret "outbox" has no key "migration-dsn"'):
        copy.render(MINIMAL)


@pytest.mark.slow
@pytest.mark.system
def test_the_notes_warn_of_what_is_unsafe(helm: Helm) -> None:
    assert "WARNING" not in helm.notes(EVERYTHING)
    unsafe = helm.notes(
        {
            "secret": {"keys": {"OUTBOX_KEY": None}},
            "relay": {"dsn": {"secret": "outbox", "key": "migration-dsn"}},
        }
    )
    assert "WARNING: without secret.keys.OUTBOX_KEY" in unsafe
    assert "WARNING: relay.dsn is migration.dsn" in unsafe
    assert "WARNING: api.dsn" not in unsafe


@pytest.mark.full
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"settings": {"OUTBOX_DRIAN_S": 3}}, "OUTBOX_DRIAN_S"),
        ({"settings": {"OUTBOX_DSN": "postgresql://secret"}}, "OUTBOX_DSN"),
        ({"settings": {"OUTBOX_ADMIN": "0.0.0.0:8080"}}, "OUTBOX_ADMIN"),
        ({"secret": {"name": ""}}, "name"),
        ({"relay": {"replicas": "two"}}, "replicas"),
        ({"replicas": 2}, "replicas"),
        ({"api": {"nodeSelektor": {}}}, "nodeSelektor"),
        ({"api": {"admin": {"ingress": {"enabled": True}}}}, "host"),
        ({"migration": {"roles": {"admin": ["x"]}}}, "admin"),
        ({"podLabels": {"size": 1}}, "size"),
        ({"resources": {"limit": {"memory": "1Gi"}}}, "limit"),
        ({"apply": {"file": "x", "secret": "y"}}, "set one of apply.file, apply.configMap"),
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
