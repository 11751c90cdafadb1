"""The delivery log: what endpoints got, and what failed."""
