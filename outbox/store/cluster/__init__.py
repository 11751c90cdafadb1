"""SQL of the replicas: leases, leadership, ownership, sessions and the server's timeline."""
