"""Django starts fast, and without an admin."""

from __future__ import annotations

import pytest

from tests.support.imports import HEAVY, loaded_by

pytestmark = pytest.mark.system

START = """
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["outbox.django"],
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}},
)
django.setup()
from django.core.checks import run_checks
assert run_checks() == []
from outbox.django import publish
"""


def test_an_application_with_the_outbox_loads_nothing_heavy() -> None:
    loaded = loaded_by(START)
    assert "outbox" in loaded
    assert not loaded & (HEAVY | {"asyncpg"})
