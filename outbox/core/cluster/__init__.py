"""Replicas: leases, assignment of endpoints, the database's clock."""
