"""All targets. Their modules are imported on demand: the fuzzer instruments modules at import, and
a list of targets must not import half of the product.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.target import Target

TARGETS = {
    "responses": (
        "responses",
        "any bytes from a receiver: a timely result, made of this response only",
    ),
    "requests": ("requests", "any URL, key and headers: one request, each relay header once"),
    "signatures": ("receiving", "only bytes that were signed are accepted"),
    "deliveries": (
        "receiving",
        "any signed body: a delivery that a database can store, or an error",
    ),
    "adapters": ("receiving", "any forged request gets a 4xx response"),
    "fetched": ("receiving", "any response in place of a relay's: usable pages, or an error"),
    "durations": ("values", "times, retry policies, statuses: rejected, or round-tripped"),
    "cron": ("values", "cron expressions in zones: ordered, correct, for any start time"),
    "patterns": ("values", "patterns of types match like a reference implementation"),
    "texts": ("values", "names, types, keys, headers, payloads: rejected, or storable"),
    "secrets": ("values", "secrets and keys: round-tripped, or rejected and never shown"),
    "filters": ("filters", "an accepted filter delays no event: no **, no nested filter, …"),
    "urls": ("addresses", "no accepted URL contains a denied address"),
    "databases": ("addresses", "database addresses: parsed or rejected; no password is shown"),
    "declarations": ("files", "files of endpoints: rejected, or round-tripped"),
    "settings": ("files", "settings: parsed or rejected; no secret is shown"),
    "commands": ("commands", "any arguments: exit code 0, 2 or 3, and one line if it failed"),
    "api": ("api", "any path, query and body: a problem document, or a valid query"),
}
"""Targets by name, each with its module and its invariant."""
NAMES = tuple(TARGETS)


def load(name: str) -> Target:
    """Return the target of this name.

    Raises:
        KeyError: There is no such target.
    """
    module, _ = TARGETS[name]
    found = importlib.import_module(f"tests.fuzz.targets.{module}").TARGETS
    targets: dict[str, Target] = {each.name: each for each in found}
    return targets[name]
