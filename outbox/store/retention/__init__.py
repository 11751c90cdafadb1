"""SQL of retention: periods, their partitions, and the erasure of payloads."""
