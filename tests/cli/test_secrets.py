"""How commands use the encryption key, and print and read secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox.core.model.encryption_keys import parse_keys
from tests.cli.test_commands import execute

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "https://example.com/hooks"


def test_without_the_key_commands_read_and_write_no_secret(here: Command) -> None:
    key = here("rekey", "--generate").out.strip()
    here("endpoint", "add", "a", URL, "--header", "X-Key: hunter2", OUTBOX_KEY=key)
    for command in (("endpoint", "rotate-secret", "a"), ("endpoint", "add", "b", URL)):
        refused = here(*command)
        assert refused.code == 3
        assert refused.error.startswith(
            f"secrets are encrypted with the key {parse_keys(key)[0].id}; set OUTBOX_KEY"
        )
    assert here("endpoint", "update", "a", "--lanes", 2).code == 0
    assert here("endpoint", "export").code == 0
    assert here("endpoint", "rotate-secret", "a", OUTBOX_KEY=key).code == 0
    tested = here("endpoint", "test", "a")
    assert 'endpoint "a": its signing secret is encrypted' in tested.error


@pytest.mark.parametrize("key", ["x", "obkey_AAAA", "whsec_" + "A" * 43])
def test_an_invalid_key_is_not_shown(outbox: Command, key: str) -> None:
    refused = outbox("endpoint", "list", OUTBOX_KEY=key, OUTBOX_DSN="x")
    assert refused.code == 2
    assert refused.error == (
        "OUTBOX_KEY: a key must be obkey_, followed by 32 bytes in base64; "
        "create one with outbox rekey --generate"
    )


def test_a_public_key_is_printed_for_a_receiver(here: Command) -> None:
    made = here("endpoint", "add", "a", URL, "--ed25519", "--json").json
    assert made["secret"].startswith("whpk_")
    assert made["secret"] in here("endpoint", "show", "a").out
    rotated = here("endpoint", "rotate-secret", "a")
    assert "public key  whpk_" in rotated.out
    assert "whsk_" not in rotated.out + rotated.err
    assert "Keep the secret" not in rotated.err


def test_headers_are_read_from_a_file(here: Command, database: Database) -> None:
    made = here(
        "endpoint", "add", "a", URL, "--headers-file", "-",
        stdin=b"Authorization: Bearer hunter2\n\nX-Env: prod\n",
    )  # fmt: skip
    assert made.code == 0, made.err
    assert execute(database, "SELECT headers::text FROM endpoint") == (
        '{"X-Env": "prod", "Authorization": "Bearer hunter2"}'
    )
    wrong = here("endpoint", "update", "a", "--headers-file", "-", stdin=b"\xff")
    assert wrong.error == "--headers-file: stdin: not text"
    wrong = here("endpoint", "update", "a", "--headers-file", "-", stdin=b"X-A: b\n\nhunter2\n")
    assert wrong.error == ('--headers-file: stdin, line 3: has no ":"; write "NAME: VALUE"')
