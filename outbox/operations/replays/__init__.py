"""Replay jobs: of many dead letters, and of the history of an endpoint."""
