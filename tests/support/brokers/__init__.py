"""Real brokers for tests."""
