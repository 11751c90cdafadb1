"""The tasks that keep a lease, own endpoints and watch connections."""
