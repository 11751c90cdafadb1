"""`outbox alerts` prints the shipped files, and its help shows how to load them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support.promtool import run_promtool
from tests.telemetry.alerts.names import TELEMETRY

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commands import Command


def test_alert_files_are_printed_unchanged(outbox: Command) -> None:
    for which, file in (("rules", "alerts.yml"), ("dashboard", "dashboard.json")):
        result = outbox("alerts", which)
        assert result.code == 0
        assert result.out.encode() == (TELEMETRY / file).read_bytes()
    assert yaml.safe_load(outbox("alerts", "rules").out)["groups"]
    assert json.loads(outbox("alerts", "dashboard").out)["panels"]


@pytest.mark.parametrize("args", [[], ["rule"], ["rules", "dashboard"]])
def test_an_unknown_file_is_a_usage_error(outbox: Command, args: list[str]) -> None:
    result = outbox("alerts", *args)
    assert result.code == 2
    assert "outbox alerts --help" in result.error


@pytest.mark.promtool
def test_the_configuration_in_the_help_is_accepted_by_prometheus(
    outbox: Command, tmp_path: Path
) -> None:
    (tmp_path / "outbox.yml").write_text(outbox("alerts", "rules").out)
    _, _, reported = outbox("alerts", "--help").out.partition("in prometheus.yml:\n")
    settings = tmp_path / "prometheus.yml"
    settings.write_text(reported.partition("\n\n")[0])
    assert yaml.safe_load(settings.read_text()).keys() == {"rule_files", "scrape_configs"}
    content, output = run_promtool("check", "config", settings)
    assert content, output
    assert "1 rule files found" in output
