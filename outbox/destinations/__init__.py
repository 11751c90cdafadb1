"""One attempt over the network: send a request and return its result."""
