"""Connections to HTTP servers of other projects: their idle close, packets and TLS handshakes."""
