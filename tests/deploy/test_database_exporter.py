"""The query for exporters, and the alerts on its metric, which need no relay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
import yaml

from tests.support.checkout import ROOT
from tests.support.promql import used
from tests.support.promtool import run_promtool
from tests.support.relay import Network, add_endpoint, all_ended, publish, running
from tests.support.roles import dsn_of, role

if TYPE_CHECKING:
    from tests.support.postgres import Database

MONITORING = ROOT / "deploy/monitoring"
QUERIES = MONITORING / "postgres_exporter.yml"
RULES = MONITORING / "database-rules.yml"
CASES = Path(__file__).with_name("database_rules_test.yml")

GAUGE = "GAUGE"


def _queries() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(QUERIES.read_text())
    return found


def test_the_rules_use_the_metric_that_the_query_exports() -> None:
    exported = set()
    for namespace, each in _queries().items():
        assert each.keys() == {"query", "metrics"}
        for column in each["metrics"]:
            ((name, described),) = column.items()
            assert described.keys() == {"usage", "description"}
            assert described["usage"] == GAUGE
            assert f"AS {name} " in each["query"]
            exported.add(f"{namespace}_{name}")
    rules = [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]
    assert {metric for rule in rules for metric in used(rule["expr"]).metrics} == exported


@pytest.mark.one_major
async def test_the_query_needs_the_documented_privileges_only(database: Database) -> None:
    grants = re.findall(r"^#   (GRANT .+) TO outbox_exporter;$", QUERIES.read_text(), re.MULTILINE)
    assert len(grants) == 2
    guide = (ROOT / "docs/howto/monitor-and-alert.md").read_text()
    assert all(f"{grant} TO outbox_exporter" in guide for grant in grants)
    ((_, each),) = _queries().items()
    await add_endpoint(database, "shop")
    async with role(database) as name, database.connection() as owner:
        for grant in grants:
            exporter = await asyncpg.connect(dsn_of(database, name))
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await exporter.fetchrow(each["query"])
            await exporter.close()
            await owner.execute(f'{grant} TO "{name}"')
        exporter = await asyncpg.connect(dsn_of(database, name))
        assert dict(await exporter.fetchrow(each["query"])) == {"age_seconds": 0.0}
        await publish(database, 1)
        (waits,) = await exporter.fetch(each["query"])
        assert waits["age_seconds"] > 0
        async with running(database, Network()):
            await all_ended(database)
        assert dict(await exporter.fetchrow(each["query"])) == {"age_seconds": 0.0}
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await exporter.fetchrow("SELECT FROM relay.outbox")
        await exporter.close()


@pytest.mark.promtool
def test_the_alerts_fire_while_events_wait_for_a_relay_and_not_while_none_waits() -> None:
    accepted, output = run_promtool("check", "rules", RULES)
    assert accepted, output
    accepted, output = run_promtool("test", "rules", CASES)
    assert accepted, output
