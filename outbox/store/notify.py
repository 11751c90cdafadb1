"""The two channels: producers ring the schema's own, sequencers ring the owners'.

A command that changes who gets what rings the first with a payload, which
wakes both.
"""

OWNERS_SUFFIX = ":owners"
RECONFIGURED = "reconfigured"

WAKE_OWNERS = f"SELECT pg_notify(current_schema() || '{OWNERS_SUFFIX}', '')"
WAKE_ALL = f"SELECT pg_notify(current_schema(), '{RECONFIGURED}')"
