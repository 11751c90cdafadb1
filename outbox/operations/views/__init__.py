"""JSON forms, shared by `--json` and the HTTP API."""
