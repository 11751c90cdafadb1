"""Chaos runs of `outbox prove`: relays under injected faults on a real database, then checks."""
