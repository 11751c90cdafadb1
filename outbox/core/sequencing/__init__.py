"""Committed events become numbered deliveries: gaps, routing, the filter budget, replays."""
