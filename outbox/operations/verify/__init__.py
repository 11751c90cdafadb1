"""`outbox verify`: checks the invariants in the database, and repairs what can be derived."""
