"""Tools for development: embedded PostgreSQL, chaos runs, the demo, receiver conformance."""
