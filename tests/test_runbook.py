"""The runbook: each alert has a section that its rule links to, and all sections have one form."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import yaml

from outbox.cli.error_pages import DOCUMENTS_URL
from tests.support.documents import read

RULES = ("outbox/telemetry/alerts.yml", "deploy/monitoring/database-rules.yml")
FOLDER = "docs/howto/"
INDEX = FOLDER + "runbook.md"
OF_ALERTS = [FOLDER + name for name in ("runbook-deliveries.md", "runbook-relay.md")]
OF_EVENTS = FOLDER + "runbook-events.md"

EVENTS = [
    "Disk full",
    "Failover",
    "A receiver is down for days",
    "Restore from a backup",
    "The relay says hidden, missing or accounting",
    "Nothing is sequenced",
    "A tenant floods",
]
PARTS = ["Meaning", "First command", "Read", "Do", "Wake"]
"""What each section of an alert has, in this order."""


@cache
def alerts() -> dict[str, list[dict[str, Any]]]:
    """The rules of each alert, by its name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in RULES:
        for group in yaml.safe_load(read(file))["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    found.setdefault(rule["alert"], []).append(rule)
    return found


@cache
def sections(document: str) -> dict[str, str]:
    """The sections of a document by their headings, in order; no heading occurs twice."""
    without_output = re.sub(
        r"^```text\n(.*?)^```$", "OUTPUT", read(document), flags=re.MULTILINE | re.DOTALL
    )
    _, *parts = re.split(r"^## (.+)$", without_output, flags=re.MULTILINE)
    headings = parts[::2]
    assert len(set(headings)) == len(headings)
    return dict(zip(headings, parts[1::2], strict=True))


def test_every_alert_has_a_section_and_every_section_an_alert_or_an_event() -> None:
    written = [heading for document in OF_ALERTS for heading in sections(document)]
    assert sorted(written) == sorted(alerts())
    assert list(sections(OF_EVENTS)) == EVENTS


def test_the_rules_link_to_the_section_of_their_alert() -> None:
    places = {name: document for document in OF_ALERTS for name in sections(document)}
    for name, rules in alerts().items():
        links = {rule["annotations"]["runbook_url"] for rule in rules}
        assert links == {f"{DOCUMENTS_URL}{places[name].removeprefix('docs/')}#{name.lower()}"}


def test_the_section_of_an_alert_says_what_it_means_what_to_do_and_when_to_wake_whom() -> None:
    for document in OF_ALERTS:
        for name, text in sections(document).items():
            assert re.findall(r"^\*\*(.+?)\.\*\*", text, re.MULTILINE) == PARTS, name
            (first,) = re.findall(r"^\*\*First command\.\*\* (.+)$", text, re.MULTILINE)
            assert re.fullmatch(r"`[^`]+`", first), name
            output = text[text.index(first) : text.index("**Read.**")]
            assert output.count("OUTPUT") == 1, name
            do = text[text.index("**Do.**") : text.index("**Wake.**")]
            assert re.search(r"^1\. ", do, re.MULTILINE), name


def test_the_first_command_is_one_that_the_rule_names() -> None:
    for name, rules in alerts().items():
        (text,) = (sections(each)[name] for each in OF_ALERTS if name in sections(each))
        command = re.search(
            r"^\*\*First command\.\*\* `(outbox [a-z]+( [a-z]+)?)", text, re.MULTILINE
        )
        assert command is not None
        assert f"`{command[1]}" in rules[0]["annotations"]["runbook"], name


def test_the_index_lists_each_alert_with_its_severity_and_section() -> None:
    listed = re.findall(r"^\| \[(\w+)\]\(([^)]+)\) \| ([a-z, ]+) \|", read(INDEX), re.MULTILINE)
    expected = []
    for document in OF_ALERTS:
        for name in sections(document):
            severities = ", ".join(rule["labels"]["severity"] for rule in alerts()[name])
            link = f"{document.removeprefix(FOLDER)}#{name.lower()}"
            expected.append((name, link, severities))
    assert listed == expected
    events = re.findall(r"\]\(runbook-events\.md#([\w-]+)\)", read(INDEX))
    assert events == [re.sub(r"[^\w ]", "", each.lower()).replace(" ", "-") for each in EVENTS]
