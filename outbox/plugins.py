"""Plug-ins: what other distributions add by entry points, each for the scheme of a URL.

An entry point is code of whoever is installed.  It is loaded when its scheme is used for the first
time, and one scheme belongs to one distribution.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from outbox.errors import OutboxError, UsageError
from outbox.extras import install_hint
from outbox.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BROKERS = "outbox-brokers"
"""The distribution with our own; it is released together with this one."""
DESTINATIONS = "outbox.destinations"
"""Group of the entry points of destinations; each is a `Destination`."""
STREAMS = "outbox.streams"
"""Group of the entry points of stream readers; each is a function from `SourceOptions` to a
function that opens a `StreamSource`."""


class PluginUnusable(UsageError):
    """Nothing usable is installed for a scheme; one line with the next step."""


@cache
def installed(group: str) -> Mapping[str, Sequence[metadata.EntryPoint]]:
    """The entry points of a group, by scheme."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    for entry in metadata.entry_points(group=group):
        found.setdefault(entry.name.lower(), []).append(entry)
    return found


@cache
def load(group: str, scheme: str) -> Any:
    """The plug-in for a scheme.

    Raises:
        PluginUnusable: none is installed, several are, or it is broken or of another version.
    """
    entries = installed(group).get(scheme, ())
    if not entries:
        raise PluginUnusable(_unknown(group, scheme))
    names = sorted({_distribution_of(each) for each in entries})
    if len(entries) > 1:
        raise PluginUnusable(f"{scheme}:// belongs to {' and to '.join(names)}; uninstall one")
    (entry,), (name,) = entries, names
    if name == BROKERS and entry.dist is not None and entry.dist.version != __version__:
        raise PluginUnusable(
            f"{name} has version {entry.dist.version}, outbox-relay {__version__}; run: "
            f"pip install '{name}=={__version__}'"
        )
    try:
        return entry.load()
    except OutboxError as error:
        raise PluginUnusable(str(error)) from None
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginUnusable(f"{name} cannot be loaded for {scheme}://: {text}") from error


def _unknown(group: str, scheme: str) -> str:
    unknown = f"nothing that is installed here knows {scheme}://"
    known, others = installed(group), ["https"] if group == DESTINATIONS else []
    if any(_distribution_of(each) == BROKERS for entries in known.values() for each in entries):
        return f"{unknown}, but {', '.join(others + sorted(known))}; correct the scheme"
    correct = "start with https://" if others else "correct the scheme"
    return f"{unknown}; {correct}, or {install_hint(f'{BROKERS}[all]=={__version__}', 'brokers')}"


def _distribution_of(entry: metadata.EntryPoint) -> str:
    return "an unknown distribution" if entry.dist is None else str(entry.dist.name)
