from __future__ import annotations

from tests.destinations.conftest import certificates

__all__ = ["certificates"]
