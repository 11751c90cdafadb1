"""`outbox listen` as a process: it verifies, counts and prints deliveries."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import pytest

from outbox.core.messages.signature import format_secret
from packages.devtools.tests.cli.listening import listen
from tests.receiver.deliveries import OTHER, SECRET
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commands import Command

pytestmark = pytest.mark.system


@pytest.mark.slow
@pytest.mark.parametrize("how", sampled(["flag", "variable", "file"]))
async def test_deliveries_are_verified_and_counted(how: str, tmp_path: Path) -> None:
    secret = format_secret(SECRET)
    path = tmp_path / "secret"
    path.write_text(secret)
    args, env = {
        "flag": (["--secret", secret], {}),
        "variable": ([], {"OUTBOX_SECRET": secret}),
        "file": ([], {"OUTBOX_SECRET_FILE": str(path)}),
    }[how]
    with listen(*args, **env) as listening:
        assert listening.before == []
        assert await listening.post(1, 2, 2, 3) == [200, 200, 200, 200]
        code, lines = listening.end()
    assert code == 0
    assert "accepted  lane a-1-0 sequence 1 order.paid key order-7" in lines[0]
    assert [line.split()[1] for line in lines[:4]] == [
        "accepted",
        "accepted",
        "duplicate",
        "accepted",
    ]
    assert lines[4:] == [
        "4 requests: 3 accepted, 1 duplicate, 0 failed, 0 rejected",
        "missing 0, out of order 0, dead-lettered by the sender 0, conflicts 0",
    ]


@pytest.mark.full
@pytest.mark.slow
async def test_the_end_of_a_lane_is_printed() -> None:
    with listen(OUTBOX_SECRET=format_secret(SECRET)) as listening:
        await listening.post(1, lane_ends=True)
        code, lines = listening.end()
    assert code == 0
    assert lines[0].endswith("sequence 1 order.paid key order-7 (last of its lane)")


@pytest.mark.slow
async def test_missing_deliveries_are_reported_at_the_end() -> None:
    with listen("--json", OUTBOX_SECRET=format_secret(SECRET)) as listening:
        await listening.post(1, 4)
        code, lines = listening.end(signal.SIGTERM)
    assert code == 1
    first, second, last = (orjson.loads(line) for line in lines)
    assert (first["outcome"], first["sequence"], first["data"]) == ("accepted", 1, {"n": 1})
    assert second["order"] == "gap"
    assert second["missing"] == [[2, 3]]
    assert last["totals"]["order"]["missing"] == 2


@pytest.mark.full
@pytest.mark.slow
async def test_an_unsigned_delivery_is_rejected() -> None:
    with listen(OUTBOX_SECRET=format_secret(SECRET)) as listening:
        assert await listening.post(1, secret=bytes(32)) == [401]
        code, lines = listening.end()
    assert code == 1
    assert "rejected  401: no signature matches" in lines[0]


@pytest.mark.full
@pytest.mark.slow
async def test_without_a_secret_a_warning_is_printed() -> None:
    with listen("--fail-rate", "1", "--latency", "1") as listening:
        assert listening.before == [
            "outbox: warning: signatures are not verified; set OUTBOX_SECRET to the endpoint's "
            "secret\n"
        ]
        statuses: list[Any] = []
        for _ in range(3):
            try:
                statuses += await listening.post(1, secret=bytes(32))
            except aiohttp.ClientError:
                statuses.append(None)
        assert set(statuses) <= {500, 503, None}
        code, lines = listening.end()
    assert code == 0
    assert all("simulated failure" in line for line in lines[:3])


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--secret", "hunter2"], 2, "secret: must hold 24 to 64 bytes, not 5"),
        (["--secret", "whsec_aHVudGVyMg=="], 2, "secret: must hold 24 to 64 bytes, not 7"),
        (["--fail-rate", "2"], 2, "fail rate: must be between 0 and 1, not 2"),
        (["--fail-rate", "x"], 2, "'x' is not a valid float"),
        (["--latency", "-1"], 2, "--latency: must be between 0 and 3600000 ms, not -1"),
        (["--forward-to", "localhost:1"], 2, "--forward-to: 'localhost:1' does not start with"),
        (["--port", "70000"], 2, "is not in the range"),
        (["--host", "192.0.2.1"], 3, "cannot listen on 192.0.2.1:8080"),
    ],
)
def test_a_usage_error_is_one_line(outbox: Command, args: list[str], code: int, says: str) -> None:
    result = outbox("listen", *args, OUTBOX_SECRET=format_secret(SECRET))
    assert result.code == code
    assert says in result.error
    assert "hunter2" not in result.error


@pytest.mark.slow
async def test_deliveries_are_forwarded_and_the_response_is_returned() -> None:
    secret = format_secret(SECRET)
    with listen(OUTBOX_SECRET=secret) as behind:
        with listen("--forward-to", behind.url, OUTBOX_SECRET=secret) as before:
            assert await before.post(1, 2, 2) == [200, 200, 200]
            assert await before.post(3, secret=OTHER) == [401]
            code, lines = behind.end()
            assert code == 0
            assert "3 requests: 2 accepted, 1 duplicate" in lines[-2]
            assert await before.post(3) == [502]
            code, lines = before.end()
        assert "failed    lane a-1-0 sequence 3" in lines[-3]
        assert "the upstream receiver cannot be reached, or responded 502" in lines[-3]
