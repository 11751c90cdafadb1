"""Responses conform to the OpenAPI document, for any request and token.

schemathesis generates valid and invalid requests from the document for a real server with a
real database.  Status, content type and schema of each response are those of the document, and
none is a 500.

--api-examples N   valid and invalid requests for each operation and token (default: 2)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi import checks

from outbox_api import rate_limit
from outbox_api.openapi import document
from outbox_api.routes import ROUTES
from outbox_api.token_bucket import Allowance
from tests.support.api import ALL, make_token, serving
from tests.support.relay import add_endpoint

if TYPE_CHECKING:
    from schemathesis import Case

    from tests.support.api import Api
    from tests.support.postgres import Database

pytestmark = [pytest.mark.one_major, pytest.mark.full]

SEED = 20_260_131
TIMEOUT_S = 60.0
COSTLY = ("/v1/doctor", "/v1/verify")
"""These read all rows, so a few requests are sufficient."""
NAMES = ("shop", "acme.shop", "nightly", "acme.nightly", "1", "7", "order-7", "all")
"""What there is, so that not everything ends with 404."""
TOKENS: dict[str, dict[str, Any] | None] = {
    "nobody": None,
    "reader": {"scopes": ("read",)},
    "publisher": {"scopes": ("publish",)},
    "operator": {"scopes": ("operate",)},
    "all": {"scopes": ALL},
    "tenant": {"scopes": ALL, "tenant": "acme"},
}
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
# A good request by its form may ask for what cannot be: a name that is taken, a URL that
# is refused.  That is not for a schema to say.
CHECKS = [
    not_a_server_error,
    checks.content_type_conformance,
    checks.ignored_auth,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.status_code_conformance,
    checks.unsupported_method,
]


def _checks(case: Case) -> list[Any]:
    # In paths, queries and headers everything is text, and so a list of one number is a number.
    body = case.meta.components.get(ParameterLocation.BODY) if case.meta is not None else None
    is_bad = body is not None and body.mode is GenerationMode.NEGATIVE
    return [*CHECKS, checks.negative_data_rejection] if is_bad else CHECKS


async def furnish(database: Database, api: Api) -> None:
    """Create rows of every kind, with and without a tenant."""
    for tenant, prefix in ((None, ""), ("acme", "acme.")):
        await add_endpoint(database, f"{prefix}shop", tenant=tenant, url="http://127.0.0.1:9/")
        await api.post(
            "/v1/schedules",
            {"name": f"{prefix}nightly", "cron": "@daily", "type": "a.b", "tenant": tenant},
        )
        await api.post("/v1/events", {"type": "order.paid", "key": "order-7", "tenant": tenant})


@pytest.mark.parametrize("who", TOKENS)
async def test_responses_conform_to_the_openapi_document(
    database: Database, who: str, api_examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each route is asked without a token, too, and who guesses is slowed down.
    monkeypatch.setattr(rate_limit, "FAILURES", Allowance(per_s=1000.0, burst=10_000))
    async with serving(database) as client:
        await furnish(database, client.with_token(await make_token(database, "furnisher")))
        scopes = TOKENS[who]
        token = None if scopes is None else await make_token(database, who, **scopes)
        # The server runs on this loop, and schemathesis waits for its responses.
        met = await asyncio.to_thread(_send_all, client.url, token, api_examples)
    print(who, sorted(met.items()))
    responses = Counter(status // 100 for status in met.elements())
    assert responses[5] == 0, met
    if who == "nobody":
        assert set(met) <= {401, 405, 429}, met
    else:
        assert responses[2] > len(ROUTES) // 10 or who == "publisher", met


def _send_all(url: str, token: str | None, examples: int) -> Counter[int]:
    """Send all requests; returns the statuses of the responses."""
    schema = schemathesis.openapi.from_dict(document(ROUTES))
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    met: Counter[int] = Counter()
    with requests.Session() as session:
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode in MODES:
                few = min(examples, 2) if operation.path in COSTLY else examples

                @seed(SEED)
                @settings(
                    max_examples=few,
                    database=None,
                    deadline=None,
                    phases=[Phase.explicit, Phase.generate, Phase.shrink],
                    suppress_health_check=list(HealthCheck),
                )
                @given(operation.as_strategy(generation_mode=mode), st.sampled_from((None, *NAMES)))
                def call_case(case: Case, name: str | None) -> None:
                    if name is not None and case.path_parameters:
                        case.path_parameters = dict.fromkeys(case.path_parameters, name)
                    response = case.call(
                        base_url=url, session=session, headers=headers, timeout=TIMEOUT_S
                    )
                    met[response.status_code] += 1
                    case.validate_response(response, checks=_checks(case), headers=headers)

                call_case()
    return met
