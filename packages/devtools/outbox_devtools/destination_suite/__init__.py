"""The conformance suite of destinations: the tests that each must pass.

It needs pytest, and pytest-asyncio in the mode `auto`: `pip install 'outbox-devtools[suite]'`.  A
test module of a destination has one class:

    class TestJsonl(BrokerConformance):
        @pytest.fixture
        def rig(self, tmp_path: Path) -> JsonlRig: ...

`Rig` says what a rig does.  `proxied` makes the links of a destination that connects to a server,
`gated` those of one whose work is done in threads.
"""

from __future__ import annotations

from outbox.errors import MissingExtra

try:
    import pytest
    import pytest_asyncio  # noqa: F401 (the tests are coroutines)
except ImportError as error:
    raise MissingExtra(
        f"the suite of destinations needs the package {error.name}, which is not installed; run: "
        "pip install 'outbox-devtools[suite]'"
    ) from None

pytest.register_assert_rewrite(f"{__name__}.conformance", f"{__name__}.egress")

from outbox_devtools.destination_suite.conformance import (  # noqa: E402 (after pytest is found)
    ELSEWHERE,
    BrokerConformance,
)
from outbox_devtools.destination_suite.egress import EgressConformance  # noqa: E402
from outbox_devtools.destination_suite.gate import GatedLink, gated  # noqa: E402
from outbox_devtools.destination_suite.proxy import ProxiedLink, cutting, proxied  # noqa: E402
from outbox_devtools.destination_suite.rig import (  # noqa: E402
    IN_DOUBT,
    OWNER,
    PATIENT_S,
    FixedResolver,
    Link,
    Rig,
    ServedRig,
    Stored,
    message,
    open_lane,
)

__all__ = [
    "ELSEWHERE",
    "IN_DOUBT",
    "OWNER",
    "PATIENT_S",
    "BrokerConformance",
    "EgressConformance",
    "FixedResolver",
    "GatedLink",
    "Link",
    "ProxiedLink",
    "Rig",
    "ServedRig",
    "Stored",
    "cutting",
    "gated",
    "message",
    "open_lane",
    "proxied",
]
