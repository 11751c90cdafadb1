"""The HTTP API, its page and the receivers' listener: a process that no delivery needs."""
