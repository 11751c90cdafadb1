"""An application's own database connections: recognize them, and run statements on them."""
