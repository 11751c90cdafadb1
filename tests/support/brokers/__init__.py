"""Servers of brokers for tests."""
