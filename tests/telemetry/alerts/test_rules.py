"""Alert rules use existing metrics, are tested, and have useful texts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
import yaml

from outbox.cli.main import cli
from outbox.telemetry.catalogue import CATALOGUE
from tests.support.promql import used
from tests.support.promtool import check_expressions, run_promtool
from tests.telemetry.alerts.names import TELEMETRY, exported, wrong

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Path(__file__).parent
RULES = TELEMETRY / "alerts.yml"
CASES = HERE / "rules_test.yml"
CASES_OF_A_DAY = HERE / "rules_day_test.yml"

ALL: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
]
RECORDED = {rule["record"]: rule for rule in ALL if "record" in rule}
ALERTS = {(r["alert"], r["labels"]["severity"]): r for r in ALL if "alert" in r}
QUERY = re.compile(r'printf "((?:[^"\\]|\\.)*)" \$labels\.job \| query')

# The required thresholds: the expression contains this text and these numbers.
THRESHOLDS = [
    ("OutboxSuccessRateLow", "critical", "success:ratio1h < 0.999"),
    ("OutboxLatencyHigh", "warning", "p95_5m > 5"),
    ("OutboxLatencyHigh", "critical", "p95_5m > 10"),
    ("OutboxAttemptsFail", "warning", "ratio5m > 0.05"),
    ("OutboxRetriesFail", "warning", "ratio15m > 0.5"),
    ("OutboxBacklogHigh", "warning", "> 1000"),
    ("OutboxFeedStalled", "warning", "> 1800"),
    ("OutboxDeadLetters", "warning", "> 10"),
    ("OutboxDeadLetters", "critical", "> 100"),
    ("OutboxDeadLettersGrow", "critical", "[1h]) > 10"),
    ("OutboxGapOld", "warning", "> 60"),
    ("OutboxHorizonOld", "warning", "> 60"),
    ("OutboxReplicaFoundDead", "warning", "outbox_replica_losses_total"),
    ("OutboxReplicaLapsed", "warning", 'state="lapsed"'),
    ("OutboxReplicaUnreachable", "warning", "up == 0"),
    ("OutboxNoLeader", "critical", "outbox_replica_leads == 1"),
    ("OutboxApiDown", "critical", "outbox_api_up == 0"),
    ("OutboxApiUnreachable", "critical", "outbox_api_requests_in_progress"),
    ("OutboxApiRestarts", "warning", "[30m]) >= 3"),
    ("OutboxApiRequestsFail", "warning", "> 0.05"),
]


def known() -> dict[str, frozenset[str]]:
    """Return all metrics with their labels; the name of a recorded one lists its labels."""
    recorded = {"job": frozenset({"job"}), "job_endpoint": frozenset({"job", "endpoint"})}
    return exported() | {name: recorded[name.partition(":")[0]] for name in RECORDED}


def queries(rule: Mapping[str, Any]) -> list[str]:
    """Return the queries in an alert's texts."""
    texts = "\n".join(rule.get("annotations", {}).values())
    found = [text.replace("%q", '"shop"') for text in QUERY.findall(texts)]
    assert len(found) == texts.count("| query"), texts
    return found


@pytest.mark.promtool
def test_promtool_accepts_the_rules() -> None:
    content, output = run_promtool("check", "rules", RULES)
    assert content, output
    assert f"SUCCESS: {len(ALL)} rules found" in output


@pytest.mark.promtool
def test_alerts_of_a_whole_day_fire_when_they_should_and_only_then() -> None:
    content, output = run_promtool("test", "rules", CASES_OF_A_DAY)
    assert content, output


def test_every_alert_has_a_firing_case_and_a_case_just_below_its_threshold() -> None:
    fired, spared = set(), set()
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        jobs = set(re.findall(r'job="(\w+)"', str(case["input_series"])))
        samples = [
            sample["labels"]
            for asked in case["promql_expr_test"]
            for sample in asked.get("exp_samples", ())
        ]
        of_alert = case["name"].partition(",")[0]
        for name, severity in ALERTS:
            shown = [
                text
                for text in samples
                if f'alertname="{name}", alertstate="firing"' in text
                and f'severity="{severity}"' in text
            ]
            # A case that names both an alert and its severity counts for that severity only.
            if of_alert != name or ("," in case["name"] and severity not in case["name"]):
                continue
            if any('job="bad"' in text for text in shown):
                fired.add((name, severity))
            if "fine" in jobs and not any('job="fine"' in text for text in shown):
                spared.add((name, severity))
    assert fired == ALERTS.keys()
    assert spared == ALERTS.keys()


def test_every_alert_with_a_for_clause_has_a_case_that_is_too_short() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    for (name, severity), rule in ALERTS.items():
        if "for" not in rule:
            continue
        asked = [a for case in cases if name in case["name"] for a in case["promql_expr_test"]]
        waiting = [
            a
            for a in asked
            if (f'"{name}", alertstate="pending"' in str(a) and severity in str(a))
            # Until then nothing fires, whatever is pending.
            or ('alertstate="firing"' in a["expr"] and "exp_samples" not in a)
        ]
        assert waiting, name


def test_alerts_do_not_flap() -> None:
    # The conditions of these alerts do not flap: they are one-time events, or `for` covers them.
    steady = {
        "OutboxDeliveriesDeadLetteredUnsent",
        "OutboxNoLeader",
        "OutboxReplicaFoundDead",
        "OutboxReplicaUnreachable",
        "OutboxSessionsLost",
        "OutboxReplicaRestarts",
        "OutboxApiUnreachable",
        "OutboxApiRestarts",
        "OutboxInstallationsMixed",
    }
    kept = {name for (name, _), rule in ALERTS.items() if rule.get("keep_firing_for") == "5m"}
    assert {name for name, _ in ALERTS} == kept | steady
    assert not kept & steady


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_use_existing_metrics(rule: dict[str, Any]) -> None:
    for expression in (rule["expr"], *queries(rule)):
        assert list(wrong(expression, known())) == [], expression


@pytest.mark.promtool
def test_queries_in_alert_texts_are_valid_promql(tmp_path: Path) -> None:
    content, output = check_expressions((q for r in ALL for q in queries(r)), tmp_path)
    assert content, output


def test_recorded_metrics_name_their_labels_and_are_used() -> None:
    uses = [used(e).metrics for rule in ALL for e in (rule["expr"], *queries(rule))]
    for name in RECORDED:
        assert re.fullmatch(r"job(_endpoint)?:outbox_[a-z_]+:[a-z0-9_]+", name)
        assert any(name in metrics for metrics in uses), name


@pytest.mark.parametrize(("name", "severity", "part"), THRESHOLDS)
def test_every_required_threshold_exists(name: str, severity: str, part: str) -> None:
    assert re.search(re.escape(part) + r"(?![0-9.])", ALERTS[name, severity]["expr"])


def test_metrics_of_the_leader_are_taken_from_the_current_leader() -> None:
    expected = {
        m.prometheus for m in CATALOGUE if "reported by the leader" in m.description.lower()
    }
    assert len(expected) == 8
    asked = {name: rule["expr"] for rule in ALL for name in used(rule["expr"]).metrics & expected}
    assert asked.keys() == expected
    for expression in asked.values():
        assert "and on (job, instance) outbox_replica_leads == 1)" in expression


@pytest.mark.parametrize(("name", "severity"), ALERTS)
def test_alert_texts_state_the_problem_and_the_action(name: str, severity: str) -> None:
    rule = ALERTS[name, severity]
    assert severity in ("warning", "critical")
    assert rule["labels"].keys() == {"severity"}
    texts = rule["annotations"]
    assert texts.keys() == {"summary", "description", "runbook", "runbook_url"}
    assert "$labels.job" in texts["summary"]
    assert "$value" in texts["description"] or "up == 0" in rule["expr"]
    # Labels that the alert keeps appear in its text.
    for label in ("endpoint", "instance"):
        if re.search(rf"^(sum|max) by \([^)]*\b{label}\b", rule["expr"]):
            assert f"$labels.{label}" in texts["description"]
    commands = re.findall(r"`outbox ([^`]*)`", texts["runbook"])
    assert commands, texts["runbook"]
    for line in commands:
        _exists(line)


def _exists(line: str) -> None:
    """Check that the command exists and accepts these options and arguments."""
    line = re.sub(r"\{\{.*?\}\}", "NAME", line)
    numbered = re.sub(r"\bID\b", "1", line)
    words = numbered.split()
    command: click.Command = cli
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, line
        command, words = found, words[1:]
    # Values are parsed, too: "--since 1h" is a duration; a reason from a template is one of them.
    words = ["backlog" if words[n - 1] == "--reason" else w for n, w in enumerate(words)]
    command.make_context(line, words)


@pytest.mark.promtool
def test_alerts_fire_when_they_should_and_only_then_with_complete_texts(tmp_path: Path) -> None:
    """promtool prints the actual alert where another one was expected.

    It evaluates the cases once for both: that takes most of the time.
    """
    document = yaml.safe_load(CASES.read_text())
    document["rule_files"] = [str(RULES)]
    for case in document["tests"]:
        moments = {
            (asked["eval_time"], name)
            for asked in case["promql_expr_test"]
            for name, _ in ALERTS
            if f'"{name}", alertstate="firing"' in str(asked)
        }
        case["alert_rule_test"] = [
            {"eval_time": time, "alertname": name, "exp_alerts": []}
            for time, name in sorted(moments)
        ]
    path = tmp_path / "texts.yml"
    path.write_text(yaml.safe_dump(document))
    content, output = run_promtool("test", "rules", path)
    assert not content
    # An expression with another result than the expected one.
    assert re.search(r"^\s+expr: ", output, re.MULTILINE) is None, output
    for flaw in ("error", "no value", "%!", "<", "{{", "NaN"):
        assert flaw not in output, output
    for name, _ in ALERTS:
        assert f'alertname="{name}"' in output
    # Endpoints, values and further queries are replaced with words.
    for expected in (
        "99.8% of the deliveries succeed",
        'Most are of endpoint shop, with the reason \\"exhausted\\" (120).',
        "50 deliveries to shop were dead-lettered unsent",
        '`outbox endpoint enable \\"shop\\"`',
        "`outbox dead list --reason backlog --since 1h`",
        "The slowest endpoint is slow:",
        "Most failed at endpoint shop, by 5xx.",
        "Most are pending to endpoint (other): 600.",
        'endpoint the \\"shop\\" has been unhealthy for 15m 1s',
        "a gap has been open for 1m 1s",
        "11 more dead letters within an hour",
        "None of the replicas of the last day (2) is the leader",
    ):
        assert expected in output, output


def test_the_runbook_for_unsent_dead_letters_matches_the_reason() -> None:
    """Only a disabled endpoint can be enabled; one with a long backlog is active."""
    rule = ALERTS["OutboxDeliveriesDeadLetteredUnsent", "critical"]
    before, disabled, rest = re.split(
        r'{{ if eq \$labels.outcome "disabled" }}(.*?){{ else }}', rule["annotations"]["runbook"]
    )
    assert "endpoint enable" in disabled
    assert "endpoint enable" not in before + rest


def test_a_blocked_lane_needs_one_decision_and_not_two() -> None:
    rule = ALERTS["OutboxLanesBlocked", "warning"]
    assert ", or `outbox endpoint resume" in rule["annotations"]["runbook"]
