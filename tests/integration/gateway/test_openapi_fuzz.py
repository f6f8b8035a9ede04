"""Schemathesis makes requests of our own OpenAPI document: none is answered 5xx, and every answer is as documented."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import running_stack
from tests.integration.gateway.redis_server import running_redis

# What a gateway serves at /openapi.json: a test keeps the two equal.
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reference" / "openapi.json"
EXAMPLES = 40  # per operation, beside the ones that cover each keyword of its schema

schema = schemathesis.openapi.from_path(
    DOCUMENT, config=schemathesis.Config.from_dict({"seed": 0, "generation": {"mode": "all"}})
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway in a thread of its own: Schemathesis is synchronous."""
    started, addresses, stop = threading.Event(), [], asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with running_stack([Worker("w0")], redis_url=redis.url) as stack:
            addresses.append(stack.url)
            started.set()
            await stop.wait()

    with running_redis(tmp_path_factory.mktemp("redis")) as redis:
        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        assert started.wait(30)
        yield addresses[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


@schema.parametrize()
@settings(max_examples=EXAMPLES, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_no_request_is_answered_5xx_or_otherwise_than_documented(case: Case, url: str) -> None:
    # A valid request may ask for a token that the model does not have: which ones it has, no schema can say.
    case.call_and_validate(base_url=url, excluded_checks=[positive_data_acceptance])
