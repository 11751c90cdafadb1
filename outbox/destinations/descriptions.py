"""Descriptions of the destinations that an endpoint's URL may name, for forms and help texts."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.destinations.broker import Destination
from outbox.plugins import DESTINATIONS, PluginUnusable, installed, load


@dataclass(frozen=True, slots=True)
class DestinationDescription:
    """A kind of destination."""

    name: str
    """`http`, or the first scheme of a stream destination."""
    title: str
    schemes: tuple[str, ...]
    """The schemes of its URLs."""
    example: str
    help: str
    """What its URL names."""


_HTTP = DestinationDescription(
    "http",
    "HTTP receiver",
    ("https", "http"),
    "https://example.com/hooks",
    "A request for each delivery. Plain http is for allowed networks only.",
)


def describe_destinations(*, for_tenant: bool = False) -> tuple[DestinationDescription, ...]:
    """Describe all kinds of destinations that can be used here, HTTP first.

    Args:
        for_tenant: only those that a tenant's token can use.
    """
    schemes: dict[Destination, list[str]] = {}
    for scheme in installed(DESTINATIONS):
        try:
            found = load(DESTINATIONS, scheme)
        except PluginUnusable:
            continue
        if isinstance(found, Destination) and (found.checks_every_address or not for_tenant):
            schemes.setdefault(found, []).append(scheme)
    described = [
        DestinationDescription(names[0], each.title, tuple(names), each.example, each.help)
        for each, names in schemes.items()
    ]
    return (_HTTP, *sorted(described, key=lambda each: each.title))
