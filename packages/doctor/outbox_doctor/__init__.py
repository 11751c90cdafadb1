"""Checks of an installation: `outbox doctor` and `outbox verify`."""
