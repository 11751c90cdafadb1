"""Mistakes that somebody could make, by which the targets show that they would notice.

Each takes something out of the product, in the process that it is called in.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable


def greedy_star() -> None:
    """A star in a pattern stands for any number of segments."""
    from outbox.core.model import pattern

    parse, module = pattern.parse, cast("Any", pattern)

    def greedy(text: str) -> re.Pattern[str]:
        read = parse(text)
        return re.compile(read.pattern.replace(r"\w+", r"[\w.]+"), read.flags)

    module.parse = greedy


def early() -> None:
    """What a receiver said before it was asked is taken for an answer."""
    from outbox.destinations.http.http1.connection import Connection

    def believing(self: Any, data: bytes) -> None:
        self._early = (self._early or b"") + data

    cast("Any", Connection)._unasked = believing


def early_by_aiohttp() -> None:
    """The same on aiohttp's connections."""
    from outbox.destinations.http.aiohttp.protocol import Protocol

    protocol: Any = Protocol
    received = protocol.data_received

    def believing(self: Any, data: bytes) -> None:
        self._asked = True
        received(self, data)

    protocol.data_received = believing
    protocol.should_close = property(lambda _: False)


def many_headers() -> None:
    """All headers of an answer are kept, however many."""
    from outbox.destinations.http import responses

    cast("Any", responses).HEADER_BYTES_MAX = 1 << 30


def unsigned_time() -> None:
    """The time stamp is no part of what is signed."""
    from outbox.core.delivery import signature

    of_all = signature._hmac

    def without(secret: bytes, *signed: bytes) -> str:
        message_id, _, rest = b"".join(signed).partition(b".")
        return of_all(secret, message_id + rest.partition(b".")[2])

    cast("Any", signature)._hmac = without
    _sign_again()


def _sign_again() -> None:
    from tests.fuzz.targets import receiving

    receiving.GOOD_HEADERS[:], _ = receiving._good()


def hidden_bang() -> None:
    """A filter inside the filter goes through."""
    from outbox.core.model import filter as filters

    del filters._REFUSED["?"]


def loose_header() -> None:
    """Headers may have ends of lines in them."""
    from outbox.core.delivery import message
    from outbox.core.model import headers

    cast("Any", headers)._VALUE = re.compile(r"[\x20-\x7e\t\r\n]*")

    def lines_of(given: Any) -> str:
        return "".join([f"{name}: {value}\r\n" for name, value in given])

    cast("Any", message).lines_of = lines_of


def told_password() -> None:
    """A password with a slash in it is shown as the name of a database."""
    from outbox.store.connection import conninfo

    wrong = conninfo.wrong

    def telling(source: str, what: str) -> Any:
        return wrong(source, what + _last_text(3))

    cast("Any", conninfo).wrong = telling


def _last_text(depth: int) -> str:
    import sys

    return str(sys._getframe(depth).f_locals.get("text", ""))


def long_number() -> None:
    """A number in a path is read whatever its length."""
    from outbox.api import tenancy

    cast("Any", tenancy).number = lambda text: int(text) if text.isdigit() else 1


def any_address() -> None:
    """Addresses in URLs are not looked at."""
    from outbox.destinations.http.egress import EgressPolicy

    cast("Any", EgressPolicy)._check_target = lambda *_, **__: None


MISTAKES: dict[str, tuple[str, Callable[[], None]]] = {
    "any-address": ("urls", any_address),
    "early": ("answers", early),
    "early-by-aiohttp": ("answers", early_by_aiohttp),
    "greedy-star": ("patterns", greedy_star),
    "inner-filter": ("filters", hidden_bang),
    "long-number": ("api", long_number),
    "loose-header": ("requests", loose_header),
    "many-headers": ("answers", many_headers),
    "told-password": ("databases", told_password),
    "unsigned-time": ("signatures", unsigned_time),
}
"""By name, with the target that has to notice."""
