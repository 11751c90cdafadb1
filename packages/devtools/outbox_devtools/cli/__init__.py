"""Commands of the leaf `outbox-devtools`."""
