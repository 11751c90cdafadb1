"""SQL of the owner of an endpoint: lanes, attempts and the state of the endpoint."""
