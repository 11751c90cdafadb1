"""Mistakes of a receiver's author are refused when the program starts, in one line."""

from __future__ import annotations

from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.messages.signature import format_secret
from outbox.errors import UsageError
from outbox.receiver import (
    AsyncReceiver,
    MemoryDatabase,
    Receiver,
    Request,
    StreamReceiver,
    Verifier,
)
from outbox.receiver.handlers import check_handler
from tests.receiver.deliveries import OTHER, SECRET, delivery, signed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXT, OTHER_TEXT = format_secret(SECRET), format_secret(OTHER)


def two(delivery: Any, connection: Any) -> None: ...
def one(delivery: Any) -> None: ...
def three(delivery: Any, connection: Any, more: Any) -> None: ...
def by_name(*, delivery: Any, connection: Any) -> None: ...
def with_default(delivery: Any, connection: Any, more: Any = None) -> None: ...
async def awaited(delivery: Any, connection: Any) -> None: ...
def yields(delivery: Any, connection: Any) -> Any:
    yield


async def awaits_and_yields(delivery: Any, connection: Any) -> Any:
    yield


class Shop:
    def paid(self, delivery: Any, connection: Any) -> None: ...
    def __call__(self, delivery: Any, connection: Any) -> None: ...


class AsyncShop:
    async def __call__(self, delivery: Any, connection: Any) -> None: ...


HANDLERS: dict[str, tuple[Any, str | None]] = {
    "two arguments": (two, None),
    "any arguments": (lambda *_: None, None),
    "a third with a default": (with_default, None),
    "a method": (Shop().paid, None),
    "an object": (Shop(), None),
    "a partial": (partial(three, more=1), None),
    "a function in C": (print, None),
    "one argument": (one, "one(delivery: 'Any') -> 'None' must take 2 arguments, as in def one("),
    "three arguments": (three, "must take 2 arguments, as in def three(delivery, connection)"),
    "arguments by name": (by_name, "must take 2 arguments"),
    "a method without its object": (Shop.paid, "must take 2 arguments"),
    "a class": (Shop, "must take 2 arguments"),
    "a generator": (yields, "the handler yields has a yield"),
    "an asynchronous generator": (awaits_and_yields, "has a yield"),
    "no function": (7, "the handler is no function, but int"),
}
OF_THREADS = {
    "a coroutine function": awaited,
    "an object with a coroutine function": AsyncShop(),
    "a partial of a coroutine function": partial(awaited),
}


@pytest.mark.parametrize("kind", [AsyncReceiver, Receiver])
def test_a_handler_that_cannot_be_called_is_refused(kind: Any) -> None:
    wrong = []
    for name, (handler, reason) in HANDLERS.items():
        receiver = kind(TEXT, MemoryDatabase())
        try:
            receiver.on("order.paid")(handler)
            if reason is not None:
                wrong.append(f"{name}: accepted")
        except UsageError as error:
            if reason is None or reason not in str(error) or "\n" in str(error):
                wrong.append(f"{name}: {error}")
    for name, handler in OF_THREADS.items():
        try:
            kind(TEXT, MemoryDatabase()).on("order.paid")(handler)
            if kind is Receiver:
                wrong.append(f"{name}: accepted")
        except UsageError as error:
            if kind is AsyncReceiver or "use AsyncReceiver" not in str(error):
                wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


def test_a_decorator_may_supply_an_argument() -> None:
    def with_session(function: Any) -> Any:
        @wraps(function)
        def handler(delivery: Any, connection: Any) -> Any:
            return function(delivery, connection, "session")

        return handler

    @with_session
    def paid(delivery: Any, connection: Any, session: Any) -> None: ...

    check_handler(paid, ("delivery", "connection"))


def test_a_handler_of_other_senders_takes_three_arguments() -> None:
    receiver = Receiver(TEXT, MemoryDatabase())
    receiver.on_foreign(three)
    with pytest.raises(UsageError, match=r"must take 3 .* def two\(verified, body, connection\)"):
        receiver.on_foreign(two)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a decorator without parentheses": (
        lambda: Receiver(TEXT, MemoryDatabase()).on(two),  # type: ignore[arg-type]
        'as in @receiver.on("order.paid"), not the handler',
    ),
    "a decorator without parentheses, of a stream": (
        lambda: StreamReceiver("redis://shop/x", MemoryDatabase()).on(two),  # type: ignore[arg-type]
        'as in @receiver.on("order.paid"), not the handler',
    ),
    "a list of patterns": (
        lambda: Receiver(TEXT, MemoryDatabase()).on(["a", "b"]),  # type: ignore[arg-type]
        "not list",
    ),
    "two secrets with a comma": (
        lambda: Verifier(f"{TEXT},{OTHER_TEXT}"), "give a list, such as text.split(',')",
    ),
    "two secrets with a space": (lambda: Verifier(f"{TEXT} {OTHER_TEXT}"), "give a list"),
    "two secrets on two lines": (lambda: Verifier(f"{TEXT}\n{OTHER_TEXT}\n"), "give a list"),
    "two secrets in one of a list": (lambda: Verifier([f"{TEXT},{OTHER_TEXT}"]), "give a list"),
    "bytes": (lambda: Verifier([SECRET]), "must be a text or a list of texts, not bytes"),  # type: ignore[list-item]
    "no secret": (lambda: Verifier(None), "at least one is required"),  # type: ignore[arg-type]
    "another policy": (
        lambda: Receiver(TEXT, MemoryDatabase(), unhandled="drop"),
        "unhandled: must be refuse or ignore, not 'drop'",
    ),
    "another policy of a stream": (
        lambda: StreamReceiver("redis://shop/x", MemoryDatabase(), unhandled="drop"),  # type: ignore[arg-type]
        "unhandled: must be refuse or ignore, not 'drop'",
    ),
}  # fmt: skip
for _address in (
    "postgresql://me:password@localhost/shop",
    "postgresql+psycopg://me:password@localhost/shop",
    "host=localhost dbname=shop password=x",
    "dbname = shop",
):
    for _kind in (AsyncReceiver, Receiver):
        MISTAKES[f"{_address} as the database of {_kind.__name__}"] = (
            partial(_kind, TEXT, _address), "an address is no database; open it",
        )  # fmt: skip


def test_each_mistake_says_what_is_meant() -> None:
    wrong = []
    for name, (make, reason) in MISTAKES.items():
        try:
            make()
            wrong.append(f"{name}: accepted")
        except UsageError as error:
            text = str(error)
            if reason not in text or "\n" in text or "password" in text or TEXT in text:
                wrong.append(f"{name}: {text}")
    assert not wrong, "\n".join(wrong)


def test_several_secrets_are_a_list(tmp_path: Path) -> None:
    headers, body = signed(delivery(1), secret=OTHER)
    given = f" {TEXT},{OTHER_TEXT}\n"
    assert Verifier(given.split(",")).verify(headers, body).messages
    # A path of SQLite with such a name is no address.
    Receiver(TEXT, str(tmp_path / "host")).start()


def respond(receiver: Receiver, kind: str, sequence: int = 1) -> Any:
    headers, body = signed(delivery(sequence, type=kind))
    return receiver.handle(Request("POST", headers, body))


def test_an_event_type_without_a_handler_is_refused() -> None:
    receiver = Receiver(TEXT, MemoryDatabase())
    receiver.on("order.payed")(two)
    receiver.on("invoice.*")(Shop())
    refused = respond(receiver, "order.paid")
    assert refused.status == 422
    assert refused.text == (
        "no handler for the event type order.paid; the receiver has order.payed (two), "
        "invoice.* (Shop): add one, subscribe the endpoint by --type, or set "
        'unhandled="ignore"'
    )
    # Nothing is recorded: the replay of the dead letter is processed once there is a handler.
    seen: list[Any] = []
    receiver.on("order.paid")(lambda message, _: seen.append(message.sequence))
    assert respond(receiver, "order.paid").text == "processed"
    assert seen == [1]


def test_an_event_type_without_a_handler_can_be_ignored() -> None:
    receiver = Receiver(TEXT, MemoryDatabase(), unhandled="ignore")
    assert respond(receiver, "order.paid").text == "processed"
    assert respond(receiver, "order.paid").text == "processed before"


def test_a_batch_is_processed_up_to_the_type_without_a_handler() -> None:
    from outbox.core.messages.batch import prepare_batch
    from outbox.core.model.headers import parse_lines
    from tests.receiver.deliveries import DAY

    batch = [delivery(1), delivery(2, type="order.noted"), delivery(3)]
    prepared = prepare_batch(batch, 0)
    headers = parse_lines(prepared.attempt(1, int(DAY.timestamp()), [SECRET]))
    receiver = Receiver(TEXT, MemoryDatabase(), tolerance_s=1e12)
    receiver.on("order.paid")(two)
    response = receiver.handle(Request("POST", headers, prepared.body))
    assert (response.status, dict(response.headers)) == (422, {"X-Accepted-Through": "1"})
