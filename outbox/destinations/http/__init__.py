"""HTTP destinations: name resolution, egress rules, TLS, connections, one attempt."""
