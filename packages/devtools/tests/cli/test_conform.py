"""`outbox conform`: a line for each case, a summary, and test vectors."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING

import orjson
import pytest

from outbox.core.messages.signature import format_secret
from outbox.receiver import verify
from outbox_devtools.cli import conform
from packages.devtools.tests.cli.test_listen import listen
from tests.receiver.deliveries import SECRET

if TYPE_CHECKING:
    from tests.support.commands import Command

TEXT = format_secret(SECRET)


@pytest.mark.slow
@pytest.mark.system
async def test_a_receiver_is_graded_case_by_case(outbox: Command) -> None:
    with listen(OUTBOX_SECRET=TEXT) as receiver:
        result = await asyncio.to_thread(outbox, "conform", receiver.url, "--secret", TEXT)
        reported = await asyncio.to_thread(
            outbox, "conform", receiver.url, "--secret", TEXT, "--json"
        )
    assert result.code == 0
    assert "  ok      a copy\n" in result.out
    assert "cases passed: it conforms" in result.out
    assert "exactly once; see --processed" in result.out
    response = orjson.loads(reported.out)
    assert response["cases"] == len(response["grades"]) > 40


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.system
async def test_the_header_prefix_of_the_endpoint_is_used(outbox: Command) -> None:
    prefix = "--header-prefix", "Acme-"
    with listen(*prefix, OUTBOX_SECRET=TEXT) as receiver:
        known = await asyncio.to_thread(outbox, "conform", receiver.url, *prefix, "--secret", TEXT)
        unknown = await asyncio.to_thread(outbox, "conform", receiver.url, "--secret", TEXT)
    assert (known.code, unknown.code) == (0, 1)
    assert "  ok      a different Acme-Sequence\n" in known.out
    assert "  failed  a delivery: " in unknown.out


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.system
async def test_a_receiver_that_does_not_verify_signatures_fails(outbox: Command) -> None:
    with listen() as receiver:
        result = await asyncio.to_thread(outbox, "conform", receiver.url, "--secret", TEXT)
    assert result.code == 1
    assert "  failed  another secret: step 2 of 3: expected 4xx, got 200\n" in result.out
    assert "          (anyone can forge events)\n" in result.out
    assert "it does not conform" in result.out


def test_exported_vectors_equal_the_cases(outbox: Command) -> None:
    result = outbox("conform", "--vectors")
    assert result.code == 0
    response = orjson.loads(result.out)
    first = response["cases"][0]["steps"][0]
    body = base64.b64decode(first["body"])
    verified = verify(first["headers"], body, response["secret"], now=response["now"])
    assert verified.messages
    assert response == orjson.loads(outbox("conform", "--vectors").out)


@pytest.mark.system
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "give the URL of the receiver"),
        (["x"], 2, "does not start with http"),
        (["http://127.0.0.1:9/", "--header-prefix", "X"], 2, "--header-prefix: 'X' must be"),
        (["http://127.0.0.1:9/"], 2, "--secret"),
        (["http://127.0.0.1:9/", "--secret", "x"], 2, "secret: must be 24 to 64 bytes in base64"),
        (["http://127.0.0.1:9/", "--secret", TEXT], 3, "http://127.0.0.1:9/ cannot be reached"),
    ],
)
def test_a_usage_error_is_one_line(
    outbox: Command, arguments: list[str], code: int, says: str
) -> None:
    result = outbox("conform", *arguments)
    assert result.code == code
    assert says in result.err
    assert result.err.count("\n") == 1


def test_the_unknown_secret_of_a_case_is_valid() -> None:
    assert conform.OTHER_SECRET.startswith("whsec_")
