"""Brokers for tests: real servers on loopback."""
