from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack


@pytest.fixture
async def stack() -> AsyncIterator[GatewayStack]:
    """A gateway in front of one worker."""
    async with running_stack([Worker("w0")]) as running:
        yield running
