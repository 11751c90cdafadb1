"""Lanes in RabbitMQ streams: at most once and in order, without a fence."""
