"""An application's own database: recognize it, run statements on it, and classify its errors."""
