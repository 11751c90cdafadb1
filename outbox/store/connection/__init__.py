"""Connections: addresses, session settings, migrations, encrypted secrets."""
