"""Output of `outbox rekey`."""

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
EVERYTHING = "SELECT string_agg(secret, ' ') FROM endpoint_secret"


def test_a_key_is_generated_without_a_database(outbox: Command) -> None:
    one = outbox("rekey", "--generate").out.strip()
    two = outbox("rekey", "--generate", "--json").json["key"]
    assert parse_keys(one) != parse_keys(two)


def test_secrets_are_encrypted_and_change_their_key(here: Command, database: Database) -> None:
    old, new = (here("rekey", "--generate").out.strip() for _ in range(2))
    (first, second) = (parse_keys(key)[0].id for key in (old, new))
    made = here("endpoint", "add", "a", URL, "--header", "X-Key: hunter2", "--json").json
    assert here("rekey").error == (
        "no encryption key; set OUTBOX_KEY (generate one with: outbox rekey --generate)"
    )
    needed = here("rekey", "--check", OUTBOX_KEY=old)
    assert (needed.code, needed.out.splitlines()[0]) == (1, "2 secrets in clear")
    assert needed.out.splitlines()[1:] == ["outbox rekey would rewrite the others"]
    done = here("rekey", OUTBOX_KEY=old)
    assert "may still contain the clear text" in done.err
    assert done.out == f"2 secrets of 1 endpoint rewritten, encrypted with the key {first}\n"
    assert made["secret"] not in execute(database, EVERYTHING)
    assert "hunter2" not in execute(database, "SELECT headers::text FROM endpoint")
    shown = here("endpoint", "show", "a")
    assert f"secrets          1 live, encrypted with the key {first}" in shown.out.splitlines()

    locked = here("rekey", "--check", OUTBOX_KEY=new)
    assert (locked.code, locked.out.splitlines()) == (
        1,
        [
            f"2 secrets encrypted with the key {first}",
            f"outbox rekey would skip secrets that OUTBOX_KEY cannot decrypt; add the key {first} "
            "to it",
        ],
    )
    both = here("rekey", "--json", OUTBOX_KEY=f"{new} {old}").json
    assert both == {"key": second, "endpoints": 1, "done": 1, "secrets": 2, "left": 0, "locked": []}
    right = here("rekey", "--check", "--json", OUTBOX_KEY=new)
    assert (right.code, right.json["needed"]) == (0, False)

    lost = here("rekey", OUTBOX_KEY=old)
    assert lost.code == 1
    assert f'skipped: endpoint "a": its signing secret is encrypted with the key {second}' in (
        lost.err
    )
    refused = here("rekey", "--decrypt", OUTBOX_KEY=new)
    assert "confirm with --yes" in refused.error
    again = here("rekey", OUTBOX_KEY=f"{old} {new}")
    assert (again.code, again.err) == (0, ""), "nothing was in clear"
    assert here("rekey", "--check", OUTBOX_KEY=old).out.splitlines()[1:] == ["nothing to do"]
    here("rekey", OUTBOX_KEY=f"{new} {old}")
    here("rekey", "--decrypt", "--yes", OUTBOX_KEY=new)
    assert execute(database, EVERYTHING) == made["secret"]
