"""A delivery that its receiver cannot process: probes of a running relay, and what is kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.response import AttemptResult
from outbox.operations.deliveries.queries import list_deliveries
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.status import read_overview
from outbox_doctor.trace.queries import trace_events
from tests.support.relay import OK, RAISED, Network, add_endpoint, fetchval, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

PATIENT = {"base_s": 3600.0, "cap_s": 3600.0}
FAILING = "SELECT count(*) = 2 FROM endpoint_health WHERE state = 'failing'"
ITS_ATTEMPTS = """
  FROM attempt a JOIN lane l ON l.id = a.lane_id JOIN endpoint e ON e.id = l.endpoint_id
 WHERE e.name = $1
"""
PROBES = f"SELECT count(*) {ITS_ATTEMPTS} AND a.outcome = 'probe'"
OUTCOMES = f"SELECT array_agg(DISTINCT a.outcome) {ITS_ATTEMPTS}"


async def test_probes_differ_from_attempts_and_can_be_turned_off(database: Database) -> None:
    """Five lanes fail at once, and their next attempts are an hour away."""
    options: dict[str, Any] = {"lanes": 8, "retry": PATIENT}
    await add_endpoint(database, "probed", **options)
    await add_endpoint(database, "spared", probes=False, **options)
    network = Network(lambda _: RAISED)
    async with running(database, network):
        for n in range(24):
            await publish(database, n, key=f"key-{n}")
        await until(lambda: fetchval(database, FAILING), what="both endpoints to fail")
        await until(lambda: fetchval(database, f"SELECT ({PROBES}) >= 4", "probed"))
        assert await fetchval(database, OUTCOMES, "spared") == ["retry"]

        async with database.at_hand() as db:
            page = await list_deliveries(db, "relay", endpoint="probed")
            row = next(each for each in page.deliveries if each.probes)
            assert row.attempts == row.probes + 1
            report = await trace_events(db, "relay", str(row.event), endpoint="probed")
            (traced,) = report.events[0].deliveries
            assert [each.outcome for each in traced.attempts][:2] == ["retry", "probe"]
            assert traced.lane_state is not None
            assert (traced.lane_state.probes, traced.lane_state.failing_lanes) == (True, 8)
            assert "to skip it" not in " ".join(report.events[0].diagnosis), "all lanes fail"
            overview = await read_overview(db, "relay")
            assert {each.name: each.probes for each in overview.endpoints} == {
                "probed": True,
                "spared": False,
            }

        # A running relay learns that they are wanted.
        network.script = lambda _: OK
        async with database.at_hand() as db:
            await endpoint_changes.update_endpoint(
                db, "relay", "spared", lambda old: replace(old, probes=True), actor="test"
            )
        await until(
            lambda: fetchval(database, "SELECT bool_and(state = 'healthy') FROM endpoint_health"),
            what="both to be found well by a probe",
        )
        await until(lambda: len(network.accepted) >= 48)


async def test_a_success_beside_poisonous_lanes_does_not_send_them_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five failures of theirs make the endpoint fail again, and each success recovers it."""
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.PROBE_MIN_S", 0.02)
    await add_endpoint(database, lanes=8, retry=PATIENT)
    keys: dict[int, str] = {}
    for n in range(100):
        slot = "SELECT ((hashtextextended($1, 0) & 9223372036854775807) % 8)::integer"
        keys.setdefault(await fetchval(database, slot, f"key-{n}"), f"key-{n}")
    network = Network(lambda sent: RAISED if sent.body["data"] == "bad" else OK)
    async with running(database, network):
        for slot_number in range(7):
            await publish(database, "bad", key=keys[slot_number])
        await until(lambda: len({each.lane for each in network.sent}) == 7)
        await publish(database, *range(300), key=keys[7])
        await until(lambda: len(network.accepted) == 300, what="the good lane to go on")
    requests = Counter(each.delivery for each in network.sent if each.body["data"] == "bad")
    assert max(requests.values()) <= 6, requests


BODY = b'{"ok": true}'
HEADERS = (("X-Request-Id", "r-1"), ("Content-Type", "application/json"), ("Server", "test"))
KEPT = f"""
SELECT array_agg(DISTINCT (a.outcome, a.response ? 'body', a.response ? 'headers')::text)
{ITS_ATTEMPTS}"""
# Of dead letters, lanes and the circuit breaker.
LAST_RESPONSES = """
SELECT bool_or(r.last_response ? 'body')
  FROM endpoint e CROSS JOIN LATERAL (
       SELECT last_response FROM dead_letter WHERE endpoint_id = e.id
        UNION ALL SELECT last_response FROM lane_progress WHERE endpoint_id = e.id
        UNION ALL SELECT last_response FROM endpoint_health WHERE endpoint_id = e.id) r
 WHERE e.name = $1
"""


async def test_responses_are_kept_as_the_endpoint_says(database: Database) -> None:
    """Also of request runs, and of a delivery that fails for good."""
    names = ("all", "failed", "none")
    for name in names:
        await add_endpoint(database, name, keep_responses=name)

    def respond(sent: Sent) -> AttemptResult:
        if sent.body["data"] == "bad":
            return AttemptResult.completed(422, 0.001, headers=HEADERS, body=BODY)
        status = 500 if sent.body["data"] == "first" and sent.attempt == 1 else 200
        return AttemptResult.completed(status, 0.001, headers=HEADERS, body=BODY)

    async with running(database, Network(respond)):
        await publish(database, "first", *range(40), "bad")
        await until(lambda: fetchval(database, "SELECT count(*) = 3 FROM dead_letter"))
    kept = {name: sorted(await fetchval(database, KEPT, name)) for name in names}
    assert kept["all"] == ["(delivered,t,t)", "(refused,t,t)", "(retry,t,t)"]
    assert kept["failed"] == ["(delivered,,)", "(refused,t,t)", "(retry,t,t)"]
    assert kept["none"] == ["(delivered,,)", "(refused,f,f)", "(retry,f,f)"]
    last = [await fetchval(database, LAST_RESPONSES, name) for name in names]
    assert last == [True, True, False]
