"""The package knows no broker by name: those are plug-ins, and not the only ones."""

from __future__ import annotations

import re

from tests.support.checkout import ROOT

BROKERS = re.compile(r"\b(redis|valkey|nats|rabbitmq|kafka)\b", re.IGNORECASE)
TEXTS = {".css", ".html", ".json", ".py", ".yml"}


def test_no_file_of_the_package_names_a_broker() -> None:
    files = [each for each in (ROOT / "outbox").rglob("*") if each.suffix in TEXTS]
    assert {each.suffix for each in files} == TEXTS
    named = [
        f"{each.relative_to(ROOT)}:{number}: {line.strip()}"
        for each in files
        for number, line in enumerate(each.read_text().splitlines(), 1)
        if BROKERS.search(line)
    ]
    assert not named, "\n".join(named)
