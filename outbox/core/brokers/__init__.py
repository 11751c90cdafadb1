"""Brokers as destinations: what an append means, and where a lane stands in its stream."""
