"""SQL of schedules and delayed events."""
