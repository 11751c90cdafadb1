"""How things are told to programs: the same objects by `--json` and by the HTTP API."""
