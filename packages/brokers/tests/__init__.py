"""Brokers as destinations, on real servers."""
