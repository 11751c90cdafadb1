"""Marks: every name that a relay, a reader or a receiver looks up is refused from publishers."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.brokers import message as broker_message
from outbox.core.messages.batch import prepare_batch
from outbox.core.messages.message import prepare
from outbox.core.messages.signed_metadata import ATTRIBUTE_PREFIX, ATTRIBUTES, METADATA_NAMES
from outbox.core.model.headers import (
    EndpointHeaders,
    event_header_problem,
    header_problem,
    merge,
    relay_headers,
)
from outbox.core.model.message_format import MessageFormat
from tests.core.test_message import DELIVERY

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

ROOT = Path(__file__).resolve().parents[2]
READERS = (
    "outbox/receiver",
    "packages/brokers/outbox_brokers",
    "outbox/core/brokers",
    "outbox/core/messages/signature.py",
    "outbox/core/messages/signed_metadata.py",
)
"""Modules that look up headers of messages which may have a publisher's headers."""
RESPONSES = {"retry-after", "x-accepted-through", "x-refused"}
"""Headers of responses, which no publisher sets."""
CREDENTIALS = {"authorization"}
NO_HEADERS = {"streams"}
"""A member of a response of the NATS API."""
TRACE = {"traceparent", "tracestate"}
"""The publishers' own."""
_HEADERS = re.compile(r"headers|named|fields|found|properties|read$", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_LUA = re.compile(r"(?:fields|ARGV)\[i\] == '([a-z-]+)'")
_OTHER = (
    # TypeScript, Go: names of constants and look-ups.
    re.compile(r"""headers\.get\(\s*["']([a-z-]+)["']"""),
    re.compile(r"""_HEADER\s*=\s*["']([a-z-]+)["']"""),
    re.compile(r"""Header\s+=\s*"([A-Za-z-]+)\""""),
    re.compile(r"""_PREFIX\s*=\s*["']([a-z]+-)["']"""),
    re.compile(r"""attributePrefix\s+=\s*"([a-z]+-)\""""),
)


def test_each_name_that_the_readers_use_is_reserved(subtests: pytest.Subtests) -> None:
    names = set(trusted_names()) | {"X-" + each for each in METADATA_NAMES}
    names |= {ATTRIBUTE_PREFIX + each for each in ATTRIBUTES}
    # Without these, the scan does not find what it should.
    assert {"outbox-control", "x-lane", "webhook-id", "Status", "X-Event-Time"} <= names
    for name in sorted(names - CREDENTIALS - NO_HEADERS - TRACE):
        if name.lower() in RESPONSES:
            continue
        with subtests.test(name=name):
            assert event_header_problem(name, "x") is not None


def trusted_names() -> Iterator[str]:
    """The names that the readers' code looks up."""
    for place in READERS:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield from _names_in(file)
    for folder, suffix in (("typescript/src", "*.ts"), ("go", "*.go")):
        for file in sorted((ROOT / "receivers" / folder).glob(f"**/{suffix}")):
            if "_test." not in file.name:
                for each in _OTHER:
                    yield from each.findall(file.read_text())


def _names_in(file: Path) -> Iterator[str]:
    module = importlib.import_module(
        ".".join(file.relative_to(_root_of(file)).with_suffix("").parts).removesuffix(".__init__")
    )
    text = file.read_text()
    yield from _LUA.findall(text)
    for node in ast.walk(ast.parse(text)):
        key: ast.expr | None = None
        prefix = ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("_get", "require_match"):
                # Read below the endpoint's prefix.
                prefix = "X-"
                key = node.args[0]
            elif node.func.attr in ("get", "pop") and _HEADERS.search(ast.unparse(node.func.value)):
                key = node.args[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            if _HEADERS.search(ast.unparse(node.value)):
                key = node.slice
        elif (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[0], ast.In)
            and _HEADERS.search(ast.unparse(node.comparators[0]))
        ):
            key = node.left
        name = _value_of(key, module)
        if isinstance(name, bytes):
            name = name.decode()
        if isinstance(name, str) and _NAME.fullmatch(name) and "_" not in name:
            yield prefix + name


def _root_of(file: Path) -> Path:
    """The folder from which a file's package is imported."""
    leaves = ROOT / "packages"
    return leaves / file.relative_to(leaves).parts[0] if file.is_relative_to(leaves) else ROOT


def _value_of(key: ast.expr | None, module: Any) -> object:
    if isinstance(key, ast.Constant):
        return key.value
    if isinstance(key, ast.Name):
        return getattr(module, key.id, None)
    if isinstance(key, ast.Attribute) and isinstance(key.value, ast.Name):
        return getattr(getattr(module, key.value.id, None), key.attr, None)
    return None


ATTACKS = (
    "outbox-control", "Outbox_Control", "outbox-anything", "X-Outbox-Control", "x-outbox-new",
    "webhook-id", "webhook-signature", "Webhook-Metadata-Signature", "ce-id", "ce_specversion",
    "body", "Body", "Status", "Description",
    "Content-Type", "X-Delivery", "X_Lane", "X-Sequence", "X-Lane-Ends", "X-Event-Time",
    "X-Acme-Sequence", "Acme-Lane", "X-Acme-Previous-Sequence", "x-a-replay-of", "X-A-Lane-Ends",
)  # fmt: skip
ALLOWED = ("traceparent", "tracestate", "X-GitHub-Event", "id", "X-Order", "Body-Part", "lane")
FORMATS = ("envelope", "thin", "raw", "cloudevents", "cloudevents-binary")


def test_marks_are_refused_from_publishers(subtests: pytest.Subtests) -> None:
    for name in ATTACKS:
        with subtests.test(refused=name):
            assert event_header_problem(name, "x") is not None
    for name in ALLOWED:
        with subtests.test(allowed=name):
            assert event_header_problem(name, "x") is None
    for name in ("outbox-control", "body"):
        with subtests.test(of_endpoint=name):
            assert header_problem(name, "x") is not None


def test_marks_of_old_events_are_left_out(subtests: pytest.Subtests) -> None:
    stored = orjson.dumps(dict.fromkeys(ATTACKS, "forged") | {"traceparent": "00-a"})
    old = DELIVERY._replace(headers=stored)
    for prefix in ("X-", "X-Acme-"):
        endpoint = EndpointHeaders((), prefix)
        with subtests.test(merge=prefix):
            assert merge(endpoint, stored) == (("traceparent", "00-a"),)
        for name in relay_headers(prefix):
            with subtests.test(name=name, prefix=prefix):
                assert merge(endpoint, orjson.dumps({name: "forged"})) == ()
        for name in FORMATS:
            with subtests.test(format=name, prefix=prefix):
                message_format = MessageFormat(name, "/shop")  # type: ignore[arg-type]
                prepared = prepare(old, 1, headers=endpoint, message_format=message_format)
                assert "forged" not in prepared.lines
                settings = _Endpoint(endpoint, message_format)
                (sent,) = broker_message.messages_of(settings, [old], 1)  # type: ignore[arg-type]
                assert "forged" not in [value for _, value in sent.headers]
                assert len({each.lower() for each, _ in sent.headers}) == len(sent.headers)
    batch = prepare_batch([old], 1)
    assert orjson.loads(batch.body)[0]["headers"] == {"traceparent": "00-a"}


class _Endpoint:
    def __init__(self, headers: EndpointHeaders, message_format: MessageFormat) -> None:
        self.headers = headers
        self.message_format = message_format
