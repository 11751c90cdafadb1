"""Commands of the leaf `outbox-doctor`."""
