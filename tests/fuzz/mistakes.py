"""Realistic mistakes, which prove that the targets would find them.

Each removes one check from the product, in the process that calls it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable


def greedy_star() -> None:
    """A star in a pattern matches any number of segments."""
    from outbox.core.model import pattern

    pattern._REGEX["*"] = pattern._REGEX["**"]


def early() -> None:
    """Bytes that a receiver sent before the request are read as its response."""
    from outbox.destinations.http.http1.connection import Connection

    def believing(self: Any, data: bytes) -> None:
        self._early = (self._early or b"") + data

    cast("Any", Connection)._on_unsolicited_data = believing


def many_headers() -> None:
    """All headers of a response are stored, however many."""
    from outbox.destinations.http import attempt_results

    cast("Any", attempt_results).HEADER_BYTES_MAX = 1 << 30


def unsigned_time() -> None:
    """The time stamp is not signed."""
    from outbox.core.messages import signature

    of_all = signature._hmac

    def without(secret: bytes, *signed: bytes) -> str:
        message_id, _, rest = b"".join(signed).partition(b".")
        return of_all(secret, message_id + rest.partition(b".")[2])

    cast("Any", signature)._hmac = without
    _re_sign()


def _re_sign() -> None:
    from tests.fuzz.targets import receiving

    receiving.GOOD_HEADERS[:], _ = receiving._good()


def hidden_bang() -> None:
    """A filter inside a filter is accepted."""
    from outbox.core.model import filter as filters

    del filters._REJECTED["?"]


def loose_header() -> None:
    """Header values may contain line breaks."""
    from outbox.core.messages import message
    from outbox.core.model import headers

    cast("Any", headers)._VALUE = re.compile(r"[\x20-\x7e\t\r\n]*")

    def format_lines(given: Any) -> str:
        return "".join([f"{name}: {value}\r\n" for name, value in given])

    cast("Any", message).format_lines = format_lines


def leaked_password() -> None:
    """A password with a slash in it is displayed as the name of a database."""
    from outbox.store.connection import conninfo

    wrong = conninfo.invalid_address

    def leaking(source: str, what: str) -> Any:
        return wrong(source, what + _last_text(3))

    cast("Any", conninfo).invalid_address = leaking


def _last_text(depth: int) -> str:
    import sys

    return str(sys._getframe(depth).f_locals.get("text", ""))


def long_number() -> None:
    """A number in a path is parsed whatever its length."""
    from outbox_api import tenancy

    cast("Any", tenancy).parse_id = lambda text: int(text) if text.isdigit() else 1


def any_address() -> None:
    """Addresses in URLs are not checked."""
    from outbox.network.egress import EgressPolicy

    EgressPolicy.check_server = lambda *_, **__: None  # type: ignore[method-assign]


MISTAKES: dict[str, tuple[str, Callable[[], None]]] = {
    "any-address": ("urls", any_address),
    "early": ("responses", early),
    "greedy-star": ("patterns", greedy_star),
    "inner-filter": ("filters", hidden_bang),
    "long-number": ("api", long_number),
    "loose-header": ("requests", loose_header),
    "many-headers": ("responses", many_headers),
    "leaked-password": ("databases", leaked_password),
    "unsigned-time": ("signatures", unsigned_time),
}
"""Mistakes by name, each with the target that must find it."""
