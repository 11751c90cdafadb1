"""The HTTP API, inside the relay's process and never needed for a delivery."""
