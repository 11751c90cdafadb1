"""Commands of the leaf `outbox-adopt`."""
