"""Adoption of another outbox table: which of its columns an event is made of."""
