"""The packages, built; one whose compiler is missing is skipped, and pytest says why."""

from __future__ import annotations

import pytest

from outbox.errors import CannotRun
from tests.receivers.programs import GO, LANGUAGES, TYPESCRIPT, Language


def _built(language: Language) -> Language:
    try:
        language.built()
    except CannotRun as error:
        pytest.skip(f"{language.name}: {error}")
    return language


@pytest.fixture(scope="session", params=LANGUAGES, ids=lambda each: each.name)
def language(request: pytest.FixtureRequest) -> Language:
    """Each package."""
    return _built(request.param)


@pytest.fixture(scope="session")
def typescript_package() -> Language:
    """The package for TypeScript."""
    return _built(TYPESCRIPT)


@pytest.fixture(scope="session")
def go_package() -> Language:
    """The package for Go."""
    return _built(GO)
