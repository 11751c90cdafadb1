"""Outbound connections: name resolution, egress rules, TLS, proxy."""
