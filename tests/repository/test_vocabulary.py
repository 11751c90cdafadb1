"""Identifiers and messages use the field's terms."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.repository.sources import PROGRAM, ROOT, TESTS, nodes, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DENIED_PARTS = {
    "answer": "response",
    "answered": "responded, completed",
    "answers": "responses",
    "aside": "run in a thread, discard",
    "bell": "wake event",
    "burial": "expiry of a replica",
    "buried": "expired",
    "bury": "expire a replica",
    "clerk": "producer",
    "clerks": "producers",
    "deck": "remaining",
    "doubted": "suspected",
    "felt": "observed",
    "ghost": "client_closed",
    "hands": "ownership history",
    "hear": "receive",
    "heard": "received",
    "helping": "chunk",
    "helpings": "chunks",
    "judge": "check",
    "judged": "checked",
    "judgement": "result",
    "look": "poll, snapshot",
    "looked": "polled, examined",
    "looking": "polling",
    "looks": "polls",
    "mend": "repair",
    "mended": "repaired",
    "mends": "repairs",
    "mind": "check",
    "news": "notification",
    "nobody": "none",
    "owed": "pending",
    "owes": "pending",
    "owing": "pending",
    "penance": "slow class factor",
    "promise": "guarantee",
    "promised": "guaranteed",
    "promises": "guarantees",
    "said": "reported, responded",
    "somebody": "one of them",
    "stories": "traces",
    "story": "trace",
    "tell": "report",
    "teller": "redactor, throttle",
    "telling": "reporting",
    "tells": "reports",
    "told": "reported",
    "verdict": "outcome, summary",
    "verdicts": "outcomes",
    "whoever": "the one that",
    "whose": "owner",
    "why": "reason",
    "wish": "request",
}
"""Part of an identifier, and what to say instead."""

DENIED_COMPOUNDS = {
    "call_off": "preempt, cancel",
    "called_off": "preempted, cancelled",
    "give_up": "dead-letter",
    "given_up": "dead-lettered",
    "hold_to": "clamp, validate, restrict to",
    "in_hand": "buffered",
}

DENIED_FUNCTIONS = {"ask", "go", "hear", "look", "of", "take", "tell"}
"""Verbs without an object."""

DENIED_WORDS = re.compile(
    r"\b(whoever|somebody|nobody|helpings?|bur(y|ied|ials?)|owe[ds]?|mend(s|ed)?|answer(s|ed)?"
    r"|promises?|verdicts?"
    r"|g[ia]ven? up|so (many|long) (as|that)?|what becomes|looks? again)\b",
    re.IGNORECASE,
)
"""Words that messages do not use."""

SYSTEM_NAMES = {"nobody", "user nobody"}
"""The Unix account, and how a message names it."""

NUMBER = re.compile(r"(?=.*\d)[-+*/%<>&|()\w., ]*")
"""An expression of numbers, and perhaps of names."""

PARTS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def identifiers(tree: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Every name that the code defines, with its line."""
    for node in tree:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias(asname=str(name)):
                yield node.lineno, name


@cache
def denied_parts(name: str) -> tuple[str, ...]:
    """What to say instead of the parts of an identifier that the lists deny."""
    parts = [part.lower() for part in PARTS.findall(name)]
    joined = f"_{'_'.join(parts)}_"
    return (
        *(DENIED_PARTS[word] for word in DENIED_PARTS.keys() & parts),
        *(better for denied, better in DENIED_COMPOUNDS.items() if f"_{denied}_" in joined),
    )


def denied(tree: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """The identifiers that the lists deny, with what to say instead."""
    for line, name in identifiers(tree):
        for better in denied_parts(name):
            yield line, f"{name}: {better}"
    for node in tree:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and node.name.lstrip("_") in DENIED_FUNCTIONS:
            yield node.lineno, f"{node.name}: a verb with its object"


def messages(tree: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """String literals with their lines. Of docstrings, those of commands: `--help` prints them."""
    bare = {id(node.value) for node in tree if isinstance(node, ast.Expr)}
    for node in tree:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            yield node.lineno, ast.get_docstring(node) or ""
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare
        ):
            yield node.lineno, node.value


def numbers(tree: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """The public constants of a module that are numbers, with their values."""
    module = tree[0]
    assert isinstance(module, ast.Module)
    for node in module.body:
        match node:
            case (
                ast.Assign(targets=[target], value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
            ):
                names, values = [target], [value]
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    names, values = target.elts, value.elts
                for name, each in zip(names, values, strict=True):
                    if isinstance(name, ast.Name) and re.match(r"[A-Z][A-Z\d_]+$", name.id):
                        text = ast.unparse(each)
                        if NUMBER.fullmatch(text):
                            yield name.id, text


@pytest.mark.slow
def test_constants_with_different_values_have_different_names() -> None:
    values: dict[str, dict[str, list[str]]] = {}
    for path in PROGRAM:
        for name, value in numbers(nodes(path)):
            where = values.setdefault(name, {}).setdefault(value, [])
            where.append(str(path.relative_to(ROOT)))
    found = [f"{name}: {places}" for name, places in values.items() if len(places) > 1]
    assert not found, "qualify the names, so that a search finds one limit\n" + "\n".join(found)


def test_the_numbers_of_a_module_are_found() -> None:
    source = (
        "ROWS, WAIT_S = 8, 1.5\nIDS: int = 2**63 - 1\nSIZE = 4 * MIB\nSIZES = (1, 5)\n"
        "_OWN = 1\nTEXT = '1'\nTYPES = get_args(Type)\nReader = 1\ndef read(): LATER = 1"
    )
    assert dict(numbers(nodes_of(source))) == {
        "ROWS": "8", "WAIT_S": "1.5", "IDS": "2 ** 63 - 1", "SIZE": "4 * MIB", "SIZES": "(1, 5)",
    }  # fmt: skip


@pytest.mark.slow
def test_identifiers_use_the_fields_terms() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {what}"
        for path in (*PROGRAM, *TESTS)
        for line, what in denied(nodes(path))
    ]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_messages_use_the_fields_terms() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {word[0]!r} in {text.strip()[:80]!r}"
        for path in PROGRAM
        for line, text in messages(nodes(path))
        if (word := DENIED_WORDS.search(text)) and text not in SYSTEM_NAMES
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "def told() -> None: ...",
        "class Teller: ...",
        "async def go() -> None: ...",
        "def clamp(called_off): ...",
        "is_owed = True",
        "import outbox as story",
    ],
)
def test_a_denied_identifier_is_found(source: str) -> None:
    assert list(denied(nodes_of(source)))


@pytest.mark.parametrize("source", ["lookup = 1", "def overtaken(): ...", "goal = ofset = 0"])
def test_a_word_that_contains_a_denied_one_is_allowed(source: str) -> None:
    assert not list(denied(nodes_of(source)))


def test_a_denied_message_is_found() -> None:
    source = '@command\ndef stop():\n    """Wait until nobody waits."""\n    echo("given up")'
    assert [bool(DENIED_WORDS.search(text)) for _, text in messages(nodes_of(source))] == [
        True,
        True,
    ]
