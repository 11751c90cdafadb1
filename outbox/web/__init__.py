"""HTTP servers: listen addresses, start and shutdown, connection limits."""
