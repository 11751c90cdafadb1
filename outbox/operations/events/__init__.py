"""Events: found, counted, erased and resequenced; future events; idempotency keys."""
