"""Where the answers are registered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    Handler = Callable[..., Any]

ANSWERS: dict[str, Handler] = {}
"""By the text of the statement; called with the database, the transaction, the arguments."""
PREFIXES: list[tuple[str, Handler]] = []
"""Of statements whose text is made for the occasion; called with the rest of it."""

H = TypeVar("H", bound="Callable[..., Any]")


def answers(*statements: str) -> Callable[[H], H]:
    """This is what the server does for these statements."""

    def register(handler: H) -> H:
        for sql in dict.fromkeys(statements):
            assert sql not in ANSWERS, sql
            ANSWERS[sql] = handler
        return handler

    return register


def answers_prefix(prefix: str) -> Callable[[H], H]:
    """This is what it does for statements that begin so."""

    def register(handler: H) -> H:
        PREFIXES.append((prefix, handler))
        return handler

    return register
