"""Chaos runs of `outbox prove` and `outbox demo`: relays under injected faults, then checks."""
