"""Changes of an installation: key rotation, and sequencing of events that were skipped."""
