"""Two other implementations of Standard Webhooks: PyPI's and npm's `standardwebhooks`."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from standardwebhooks import Webhook, WebhookVerificationError

from tests.support.npm import NodeScript

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VERSION = "1.1.1"


class ToSign(NamedTuple):
    """A message to sign at a time in epoch seconds."""

    secret: str
    id: str
    timestamp: int
    body: bytes


class ToVerify(NamedTuple):
    """A request to verify now."""

    secret: str
    headers: Mapping[str, str]
    body: bytes


class Peer(Protocol):
    """Another implementation."""

    def signed(self, what: Iterable[ToSign]) -> list[str]:
        """The signatures of the messages."""
        ...

    def accepts(self, what: Iterable[ToVerify]) -> list[bool]:
        """Whether each request is accepted."""
        ...


class Pypi:
    """The PyPI package, in this process."""

    def signed(self, what: Iterable[ToSign]) -> list[str]:
        return [
            Webhook(each.secret).sign(
                each.id, datetime.fromtimestamp(each.timestamp, tz=UTC), each.body.decode()
            )
            for each in what
        ]

    def accepts(self, what: Iterable[ToVerify]) -> list[bool]:
        return [self._accepts(each) for each in what]

    def _accepts(self, what: ToVerify) -> bool:
        try:
            Webhook(what.secret).verify(what.body, dict(what.headers), json_parse=False)
        except (WebhookVerificationError, ValueError):
            # A signature that cannot be decoded is a ValueError.
            return False
        return True


class Npm:
    """The npm package, in Node: one process for all messages at once.

    Raises:
        CannotRun: as `NodeScript`.
    """

    def __init__(self) -> None:
        self._script = NodeScript("standardwebhooks", VERSION, "standardwebhooks.cjs")

    def signed(self, what: Iterable[ToSign]) -> list[str]:
        responses: list[str] = self._run_library(what)
        return responses

    def accepts(self, what: Iterable[ToVerify]) -> list[bool]:
        responses: list[bool] = self._run_library(what)
        return responses

    def _run_library(self, what: Iterable[ToSign | ToVerify]) -> Any:
        return self._script.run(
            [each._asdict() | {"body": base64.b64encode(each.body).decode()} for each in what]
        )
