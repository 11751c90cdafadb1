"""Streams of Redis and Valkey."""
