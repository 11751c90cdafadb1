"""Alerts for Prometheus and a dashboard for Grafana; `outbox alerts` prints them.

`rules.yml` is written by hand, `dashboard.json` by `outbox.telemetry.alerts.dashboard`.  Both use
what `outbox.telemetry.catalogue` lists.
"""

from __future__ import annotations

from importlib.resources import files

FILES = {"rules": "rules.yml", "dashboard": "dashboard.json"}


def read(which: str) -> bytes:
    """One of the files, as it is to be loaded.

    Args:
        which: a key of `FILES`.
    """
    return files(__name__).joinpath(FILES[which]).read_bytes()
