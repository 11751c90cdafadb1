"""The port of stream destinations: what a plug-in may import, and all that it needs.

A distribution adds a destination by entry points of the group `outbox.destinations`, one for each
scheme of its URLs; each names a `Destination`.  The guide is "Write a destination".
"""

from __future__ import annotations

from outbox.core.brokers.broker_url import BrokerUrl, Server, decode_name, parse_broker_url
from outbox.core.brokers.port import (
    APPEND_MAX,
    Appended,
    Capabilities,
    Fenced,
    Foreign,
    Message,
    Owner,
    Position,
    Standing,
    Stop,
    StopKind,
)
from outbox.core.model.response import one_line
from outbox.core.model.text import quoted
from outbox.destinations.broker import (
    Broker,
    BrokerAddress,
    BrokerFinding,
    Destination,
    Target,
    stopped_finding,
)
from outbox.destinations.broker_connection import BrokerOpener, stop_of
from outbox.errors import UsageError
from outbox.network.dns import Resolver, Unresolved
from outbox.network.egress import EgressPolicy
from outbox.network.errors import NotConnected
from outbox.plugins import PluginUnusable

__all__ = [
    "APPEND_MAX",
    "Appended",
    "Broker",
    "BrokerAddress",
    "BrokerFinding",
    "BrokerOpener",
    "BrokerUrl",
    "Capabilities",
    "Destination",
    "EgressPolicy",
    "Fenced",
    "Foreign",
    "Message",
    "NotConnected",
    "Owner",
    "PluginUnusable",
    "Position",
    "Resolver",
    "Server",
    "Standing",
    "Stop",
    "StopKind",
    "Target",
    "Unresolved",
    "UsageError",
    "decode_name",
    "one_line",
    "parse_broker_url",
    "quoted",
    "stop_of",
    "stopped_finding",
]
