"""Readers of streams, for `outbox.receiver.StreamReceiver`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_brokers.client_library import load_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.receiver.streams.source import SourceOptions, StreamSource


def redis_source(options: SourceOptions) -> Callable[[], StreamSource]:
    """Reads streams of Redis and Valkey."""
    return _factory("redis", "RedisSource", options)


def nats_source(options: SourceOptions) -> Callable[[], StreamSource]:
    """Reads subjects of NATS JetStream."""
    return _factory("nats", "NatsSource", options)


def _factory(name: str, class_name: str, options: SourceOptions) -> Callable[[], StreamSource]:
    connect: Callable[[], StreamSource] = load_class(name, name, "source", class_name).factory(
        options
    )
    return connect
