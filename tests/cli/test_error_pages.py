"""The line after an error names the page that explains it; tests/test_docs.py checks the pages."""

from __future__ import annotations

import builtins
import re
from typing import TYPE_CHECKING

import asyncpg
import pytest

from outbox.cli.error_pages import PAGES, find_page
from outbox.core.model.encryption_keys import format_key
from outbox.errors import CannotRun, UsageError
from tests.repository.sources import PROGRAM

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

LOCAL = ("endpoint", "add", "a", "http://10.1.2.3/")
NETWORK = "howto/allow-a-private-network.md"


def test_every_page_has_a_class_of_errors() -> None:
    text = "\n".join(path.read_text("utf-8") for path in PROGRAM)
    classes = set(re.findall(r"^class (\w+)", text, re.MULTILINE))
    named = {name for names in PAGES.values() for name in names}
    others = {*dir(asyncpg), *dir(builtins)}
    assert named - classes - others == set()


@pytest.mark.parametrize(
    ("args", "page"),
    [
        (("status", "--schema", "nowhere"), "howto/upgrade.md"),
        (LOCAL, NETWORK),
        (("endpoint", "add", "a", "redis2://broker/a"), "howto/deliver-to-a-broker.md#set-it-up"),
        (("endpoint", "show", "a"), None),
        (("status", "--limit", "x"), None),
    ],
)
def test_the_line_after_an_error_names_its_page(
    here: Command, args: tuple[str, ...], page: str | None
) -> None:
    result = here(*args)
    assert result.code in (2, 3)
    assert result.error
    assert result.page == page


def test_a_declared_private_address_and_a_wrong_key_have_a_page(
    here: Command, database: Database
) -> None:
    declared = b'{"endpoints": [{"name": "a", "url": "http://10.1.2.3/"}]}'
    refused = here("apply", "-f", "-", stdin=declared)
    assert refused.error.startswith("-: endpoints[0].url: 10.1.2.3 is a private network")
    assert refused.page == NETWORK
    old, new = (format_key(bytes([n]) * 32) for n in (1, 2))
    here("endpoint", "add", "a", "https://example.com/", OUTBOX_KEY=old)
    locked = here("endpoint", "rotate-secret", "a", OUTBOX_KEY=new)
    assert (locked.code, locked.page) == (3, "howto/encrypt-secrets.md")


def test_the_page_of_a_cause_is_that_of_its_error() -> None:
    denied = asyncpg.InsufficientPrivilegeError("no")
    assert find_page(denied) is not None
    error = CannotRun("no")
    error.__cause__ = denied
    assert find_page(error) == find_page(denied)
    assert find_page(UsageError("no")) is None
    assert find_page(None) is None
