"""From committed events to numbered deliveries: gaps, routing, the filter budget, replays."""
