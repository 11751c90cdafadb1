"""Endpoints: their settings, states, secrets and lanes, shown and changed."""
