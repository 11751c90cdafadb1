"""HTTP destinations: one attempt, and the connections that carry it."""
