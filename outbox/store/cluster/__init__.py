"""SQL of the replicas: leases, ownership, sessions and the server's timeline."""
