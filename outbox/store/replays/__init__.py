"""SQL of the leader for replay jobs."""
