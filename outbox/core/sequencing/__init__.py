"""From committed events to numbered deliveries: gaps, routing, filter budgets, replays."""
