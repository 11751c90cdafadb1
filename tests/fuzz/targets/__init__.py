"""All targets.  Their modules are imported when they are asked for: the fuzzer instruments
what is imported while it looks, and a list of them need not import half of the product.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.target import Target

TARGETS = {
    "answers": ("answers", "any bytes from a receiver: an answer in time, of this request alone"),
    "requests": ("requests", "any URL, key and headers: one request on the wire, ours in it once"),
    "signatures": ("receiving", "nothing is believed but what was signed, byte for byte"),
    "deliveries": (
        "receiving",
        "of what is signed: a delivery that a database can keep, or why not",
    ),
    "adapters": ("receiving", "whatever a server hands on is answered with a 4xx, never believed"),
    "fetched": ("receiving", "whatever answers in a relay's place: usable pages, or why not"),
    "durations": ("values", "times, retry policies, statuses: refused, or read back the same"),
    "cron": ("values", "cron expressions in zones: in order, as they say, however one asks"),
    "patterns": ("values", "patterns of types match as a reader of their segments would"),
    "texts": ("values", "names, types, keys, headers, payloads: refused, or fit to be kept"),
    "secrets": ("values", "secrets and keys: read back the same, or refused and never shown"),
    "filters": ("filters", "what is let through holds up nobody: no **, no filter inside, …"),
    "urls": ("addresses", "none that is let through names an address that is refused"),
    "databases": ("addresses", "addresses of databases: read or refused; no password is shown"),
    "declarations": ("files", "files of endpoints: refused, or read back the same when written"),
    "settings": ("files", "settings of variables and a file: read or refused; no secret is shown"),
    "commands": ("commands", "any arguments: exit code 0, 2 or 3, and one line if it failed"),
    "api": ("api", "any path, query and body: a problem, or the database is asked well"),
}
"""Each with the module that it is in, and what has to hold."""
NAMES = tuple(TARGETS)


def load(name: str) -> Target:
    """The target of this name.

    Raises:
        KeyError: there is none.
    """
    module, _ = TARGETS[name]
    found = importlib.import_module(f"tests.fuzz.targets.{module}").TARGETS
    targets: dict[str, Target] = {each.name: each for each in found}
    return targets[name]
