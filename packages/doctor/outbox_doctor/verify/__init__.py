"""`outbox verify`: checks the invariants in the database."""
