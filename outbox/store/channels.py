"""The two channels: producers ring the schema's own, sequencers ring the owners'.

A command that changes who gets what rings both; only who sequences listens to the
first.  What sequencers tell is in `outbox.core.sequencing.batch_notifications`.
"""

OWNERS_SUFFIX = ":owners"
RECONFIGURED = "reconfigured"

WAKE_OWNERS = f"SELECT pg_notify(current_schema() || '{OWNERS_SUFFIX}', $1)"
WAKE_ALL = f"""
SELECT pg_notify(current_schema(), '{RECONFIGURED}'),
       pg_notify(current_schema() || '{OWNERS_SUFFIX}', '{RECONFIGURED}')
"""
