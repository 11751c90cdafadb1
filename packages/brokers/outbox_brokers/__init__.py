"""Brokers as destinations of outbox-relay, and readers of their streams.

plugins         the entry points of the relay: what each URL scheme names
readers         the entry points of consumers: no package of the relay is needed
redis           streams of Redis and Valkey
nats            subjects of NATS JetStream
rabbitmq        RabbitMQ Streams
kafka           topics of Kafka

The relay knows the ports `outbox.destination` and `outbox.receiver.streams.source`, and imports
nothing of this package by name.
"""
