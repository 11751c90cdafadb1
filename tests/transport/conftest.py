from __future__ import annotations

import pytest

from tests.transport import certificates as tls


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tls.Certificates:
    return tls.make(tmp_path_factory.mktemp("tls"))
