"""The command `outbox api`."""
