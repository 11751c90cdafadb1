"""Handlers of a receiver: their registration, and which ones an event has."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from outbox.core.model.pattern import parse as parse_pattern
from outbox.errors import UsageError
from outbox.receiver.errors import UnhandledType

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    Unhandled: TypeAlias = Literal["refuse", "ignore"]
    """What happens to an event whose type has no handler."""

DELIVERY_PARAMETERS = ("delivery", "connection")
FOREIGN_PARAMETERS = ("verified", "body", "connection")
"""Parameters of the handlers, as examples name them."""


class _Registered(NamedTuple):
    pattern: str
    types: re.Pattern[str]
    handler: Callable[..., Any]


@dataclass(slots=True)
class HandlerRegistry:
    """Registered handlers, each with a pattern of event types.

    Raises:
        UsageError: the policy for types without a handler is none.
    """

    unhandled: Unhandled = "refuse"
    _handlers: list[_Registered] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.unhandled not in ("refuse", "ignore"):
            raise UsageError(f"unhandled: must be refuse or ignore, not {self.unhandled!r}")

    def add(self, pattern: str, types: re.Pattern[str], handler: Callable[..., Any]) -> None:
        """Register a handler for the event types that match."""
        self._handlers.append(_Registered(pattern, types, handler))

    def matching(self, event_type: str) -> Sequence[Callable[..., Any]]:
        """Return the handlers of an event type, in registration order.

        Raises:
            UnhandledType: there is none, and such events are refused.
        """
        matching = [each.handler for each in self._handlers if each.types.fullmatch(event_type)]
        if not matching and self.unhandled == "refuse":
            known = ", ".join(f"{each.pattern} ({_name(each.handler)})" for each in self._handlers)
            raise UnhandledType(
                f"no handler for the event type {event_type}; the receiver has {known or 'none'}: "
                'add one, subscribe the endpoint by --type, or set unhandled="ignore"'
            )
        return matching


def parse_types(pattern: object) -> tuple[str, re.Pattern[str]]:
    """Parse the argument of `on`.

    Raises:
        UsageError: it is no pattern.
    """
    if not isinstance(pattern, str):
        what = "the handler" if callable(pattern) else type(pattern).__name__
        raise UsageError(
            f'on: needs a pattern of event types, as in @receiver.on("order.paid"), not {what}'
        )
    return pattern, parse_pattern(pattern)


def check_handler(handler: Any, parameters: Sequence[str]) -> None:
    """Check that a handler can be called.

    Args:
        parameters: names of the arguments that it is called with.

    Raises:
        UsageError: it cannot.
    """
    if not callable(handler):
        raise UsageError(f"the handler is no function, but {type(handler).__name__}")
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise UsageError(f"the handler {_name(handler)} has a yield: calling it would do nothing")
    try:
        # Of the function that is called: a decorator may supply arguments of the one inside.
        signature = inspect.signature(handler, follow_wrapped=False)
    except (TypeError, ValueError):
        # A function in C.
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        example = f"def {_name(handler)}({', '.join(parameters)})"
        raise UsageError(
            f"the handler {_name(handler)}{signature} must take {len(parameters)} arguments, as in "
            f"{example}"
        ) from None


def is_coroutine_function(handler: Callable[..., Any]) -> bool:
    """Whether calling it returns a coroutine; also of an object that can be called."""
    return any(map(inspect.iscoroutinefunction, (handler, type(handler).__call__)))


def _name(handler: Callable[..., Any]) -> str:
    return str(getattr(handler, "__name__", type(handler).__name__))
