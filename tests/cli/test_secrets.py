"""How commands use the encryption key, and print and read secrets."""

from __future__ import annotations

import base64
import itertools
import re
from typing import TYPE_CHECKING

import pytest

from outbox.core.model.encryption_keys import parse_keys
from tests.cli.test_commands import execute

if TYPE_CHECKING:
    from pathlib import Path

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


GIVEN = "whsec_" + base64.b64encode(bytes(range(32))).decode()
HEX = "whsec_" + "0123456789abcdef" * 4
LACKS = "compat.secret: is missing; give the secret that the receiver checks with"


def test_a_given_secret_is_read_from_a_file_and_not_printed(here: Command, tmp_path: Path) -> None:
    file = tmp_path / "acme.secret"
    file.write_text(f"{GIVEN}\n")
    made = here("endpoint", "add", "a", URL, "--secret-file", file)
    assert "secret  the given one" in made.out
    assert "Save the secret" not in made.err
    again = here("endpoint", "rotate-secret", "a", "--secret-file", file)
    assert (again.code, again.error) == (2, 'endpoint "a" signs with this secret already')
    rotated = here("endpoint", "rotate-secret", "a", "--secret-file", "-", stdin=b"Z" * 43)
    assert "secret      the given one" in rotated.out
    added = here("endpoint", "add", "b", URL, "--secret-file", file, "--json").json
    assert added["secret"] is None
    assert GIVEN not in made.out + rotated.out + rotated.err


def test_a_secret_with_two_meanings_asks_for_its_encoding(here: Command) -> None:
    add = ("endpoint", "add", "a", URL, "--secret-file", "-")
    refused = here(*add, stdin=HEX.encode())
    assert refused.code == 2
    assert refused.error == (
        "secret: some senders decode such hex digits as base64, and some sign with the text's own "
        "bytes; give the secret encoding: base64 or raw"
    )
    assert here("endpoint", "list", "--json").json == []
    assert here(*add, "--secret-encoding", "raw", stdin=HEX.encode()).code == 0
    alone = here("endpoint", "add", "b", URL, "--secret-encoding", "raw")
    assert (alone.code, alone.error) == (2, "--secret-encoding: is for --secret-file")
    missing = here("endpoint", "add", "b", URL, "--secret-file", "/dev/null")
    assert missing.error == "secret: must hold 24 to 64 bytes, not 0"


def test_a_secret_in_place_of_its_file_is_not_repeated(here: Command, tmp_path: Path) -> None:
    flags = (["--secret-file"], ["--compat", "github", "--compat-secret-file"])
    for words, reason in itertools.product(flags, ("No such file or directory", "Is a directory")):
        given = tmp_path if reason == "Is a directory" else GIVEN
        refused = here("endpoint", "add", "a", URL, *words, given)
        assert refused.code == 2
        assert f"'{words[-1]}': {reason}; give the name of a file, or - for stdin" in refused.error
        assert str(given) not in refused.err
    for words in (
        ["update", "a", "--headers-file"], ["credentials", "a"], ["certificate", "a"],
    ):  # fmt: skip
        refused = here("endpoint", *words, GIVEN)
        assert refused.code == 2
        assert "No such file or directory; give the name of a file" in refused.error
        assert GIVEN not in refused.err


def test_a_compat_signature_is_set_shown_counted_down_and_reset(
    here: Command, tmp_path: Path
) -> None:
    file = tmp_path / "hub.secret"
    file.write_text("hub-4711\n")
    lacks = here("endpoint", "add", "a", URL, "--compat", "github")
    assert (lacks.code, lacks.error) == (2, LACKS)
    add = ("endpoint", "add", "a", URL, "--compat-secret-file", file)
    assert here(*add).error == "--compat-secret-file, --compat-until: need --compat as well"
    listed = here(*add, "--compat", '{"preset": "github", "secret": "hub-4711"}')
    assert listed.error == "--compat: ps shows a secret in an argument; use --compat-secret-file"
    assert here(*add, "--compat", "github").code == 0
    update = ("endpoint", "update", "a")
    past = here(*update, "--compat-until", "2019-01-01")
    assert (past.code, past.error) == (2, "compat.until: 2019-01-01T00:00:00Z is in the past")
    changed = here(*update, "--compat-until", "2199-01-31")
    assert "compat: github -> github until=2199-01-31T00:00:00Z" in changed.out
    shown = here("endpoint", "show", "a")
    assert re.search(r"compat  +github until=2199-01-31T00:00:00Z \(\d+ days left\)", shown.out)
    assert re.search(r"compat secrets  +1 live, in clear", shown.out)
    status = here("status").out
    assert re.search(r"compat signatures  of 1 endpoint; the next end: a, \d+ days left", status)
    file.write_text("hub-4712\n")
    secret = here("endpoint", "rotate-secret", "a", "--compat", "--secret-file", file)
    assert secret.code == 0
    form = '{"preset": "custom", "header": "X-Acme", "value": "v={signature}"}'
    assert here(*update, "--compat", form).code == 0
    wrong = here(*update, "--header", "x-acme: 1")
    assert wrong.error == "headers: 'x-acme' is set by the compat signature"
    exported = here("endpoint", "export").out
    assert "hub-471" not in shown.out + status + exported + here("journal", "--json").out
    assert here("apply", "-f", "-", stdin=exported.encode()).out == "= a\nnothing to change\n"
    assert here(*update, "--reset", "compat").code == 0
    assert "compat signatures" not in here("status").out
    assert len(here("endpoint", "show", "a", "--json").json["secrets"]) == 1
