"""The reference page of the schema: functions to call, and tables, from the migrations' text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from outbox.store.privileges import PURPOSES
from outbox.store.schema.migration_files import migrations

CALLED = {
    "Publish": (
        "publish",
        "publish_text",
        "publish_many",
        "claim_once",
        "reset_once",
        "payload_bytes_max",
        "snapshot_position",
    ),
    "Administer": (
        "set_payload_bytes_max",
        *(f"grant_{purpose}" for purpose in PURPOSES),
        "revoke_purposes",
    ),
}
"""Functions that are a contract; the relay calls the others."""

HEAD = """\
# SQL

The functions and tables of the schema, here `relay` (`OUTBOX_SCHEMA`). An application calls
`publish_text` or `publish`, or inserts into `outbox`:
[Publish with SQL](../howto/publish-from-sql.md) is the guide.
[Grant database roles](../howto/grant-database-roles.md) says which role may do what.

Call functions with named arguments:
`SELECT relay.publish_text(type => 'order.paid', payload => '{}')`.
"""

TABLES_HEAD = """
## Tables

Only inserts into `outbox` are a contract. The other tables are the relay's: read them, and change
them with the commands. They may change with every migration.
"""

_COMMENTED = r"(?P<comment>(?:^--[^\n]*\n)*)^CREATE (?:OR REPLACE )?"
_FUNCTION = re.compile(
    _COMMENTED + r"FUNCTION (?P<name>\w+)\((?P<arguments>.*?)\)\s*RETURNS (?P<result>\w+(?:\[\])?)",
    re.MULTILINE | re.DOTALL,
)
_TABLE = re.compile(
    _COMMENTED + r"TABLE (?P<name>\w+) \((?P<body>.*?)^\)", re.MULTILINE | re.DOTALL
)
_COLUMN = re.compile(
    r"^    (?P<name>[a-z_0-9]+) +(?P<type>\"char\"|[a-z_0-9]+\b(?:\[\])?)(?! KEY)", re.MULTILINE
)
_ALTERED = re.compile(r"^ALTER TABLE (?P<table>\w+)(?P<body>[^;]*);", re.MULTILINE)
_ADDED = re.compile(r"ADD (?:COLUMN )?(?P<name>[a-z_0-9]+) +(?P<type>[a-z_0-9\[\]]+)")
_DROPPED = re.compile(r"DROP COLUMN (?P<name>[a-z_0-9]+)\b")
_GONE = re.compile(r"^DROP TABLE (?P<name>\w+);", re.MULTILINE)
_LIKE = re.compile(r"^    LIKE (?P<name>\w+)", re.MULTILINE)
_BODY_ADDED = re.compile(r"PERFORM add_body\('(?P<table>\w+)'")
VIEWS: dict[str, tuple[str, dict[str, str | None]]] = {
    "delivery": ("delivery_run", {"offsets": None}),
    "attempt": (
        "attempt_run",
        {"count": None, "starts_us": None, "elapses_ms": None, "outcome": "text"},
    ),
}
"""The views of runs: each has the columns of a table, except for these."""
_KEYWORDS = {"constraint", "column", "primary", "unique", "check", "foreign", "partition", "like"}


@dataclass
class Table:
    """A table after all migrations."""

    comment: str
    columns: dict[str, str] = field(default_factory=dict)


def page() -> str:
    """The page as Markdown."""
    text = "\n".join(migration.sql for migration in migrations())
    return HEAD + _functions(text) + TABLES_HEAD + _tables(text)


def _functions(text: str) -> str:
    # A later migration replaces a function, often with the comment in the earlier one.
    comments: dict[str, str] = {}
    signatures: dict[str, str] = {}
    for each in _FUNCTION.finditer(text):
        name = each["name"]
        comments[name] = _sentences(each["comment"]) or comments.get(name, "")
        arguments = re.sub(r"--.*", "", each["arguments"])
        lines = [" ".join(line.split()) for line in arguments.splitlines() if line.strip()]
        listed = "".join(f"\n    {line}" for line in lines)
        closing = "\n)" if len(lines) > 1 else ")"
        opened = listed if len(lines) > 1 else "".join(lines)
        signatures[name] = f"{name}({opened}{closing} RETURNS {each['result']}"
    parts = []
    for title, names in CALLED.items():
        parts.append(f"\n## {title}\n")
        for name in names:
            described = f"\n{comments[name]}\n" if comments[name] else ""
            parts.append(f"\n### {name}\n\n```text\n{signatures[name]}\n```\n{described}")
    return "".join(parts)


def _tables(text: str) -> str:
    found: dict[str, Table] = {}
    for each in _TABLE.finditer(text):
        table = found[each["name"]] = Table(_sentences(each["comment"]))
        if like := _LIKE.search(each["body"]):
            table.columns |= found[like["name"]].columns
        table.columns |= _columns(_COLUMN, each["body"])
    for each in _ALTERED.finditer(text):
        if each["table"] in found:
            altered = found[each["table"]].columns
            altered |= _columns(_ADDED, each["body"])
            for dropped in _DROPPED.finditer(each["body"]):
                altered.pop(dropped["name"], None)
    for each in _BODY_ADDED.finditer(text):
        found[each["table"]].columns |= {"body": "bytea", "content_type": "text"}
    for each in _GONE.finditer(text):
        del found[each["name"]]
    for name, (of_table, changes) in VIEWS.items():
        columns: dict[str, str | None] = {**found[of_table].columns, **changes}
        kept = {key: kind for key, kind in columns.items() if kind is not None}
        found[name] = Table(f"A view with a row for each {name} of the runs in `{of_table}`.", kept)
    parts = []
    for name in sorted(found):
        described = f"{found[name].comment}\n\n" if found[name].comment else ""
        rows = "".join(f"| `{key}` | `{kind}` |\n" for key, kind in found[name].columns.items())
        parts.append(f"\n### {name}\n\n{described}| column | type |\n|---|---|\n{rows}")
    return "".join(parts)


def _columns(pattern: re.Pattern[str], text: str) -> dict[str, str]:
    return {
        each["name"]: each["type"]
        for each in pattern.finditer(text)
        if each["name"].lower() not in _KEYWORDS
    }


def _sentences(comment: str) -> str:
    """The first paragraph of a comment, without rulers between sections."""
    lines = [line.removeprefix("--").strip() for line in comment.splitlines()]
    kept = [
        line
        for line in lines
        if not line.startswith(("---", "Compatible with programs", "Relays stop"))
    ]
    while kept and not kept[0]:
        del kept[0]
    paragraph = " ".join(kept).strip() if "" not in kept else " ".join(kept[: kept.index("")])
    # References to the source, which a reader of the page does not have.
    paragraph = re.sub(r" \(see outbox/[^)]*\)", "", " ".join(paragraph.split()))
    paragraph = re.sub(r"; see \S+\.(?:sql|py)\.?", ".", paragraph)
    # Code, so that Markdown does not read underscores and angle brackets as its own.
    return re.sub(r"(?<![\w`])(\w+_\w+(?:\(\))?)(?![\w`])", r"`\1`", paragraph)
