"""A simulated PostgreSQL: what it must be so that a relay can tell no difference."""
