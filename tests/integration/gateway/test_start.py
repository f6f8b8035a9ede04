"""What a gateway says that cannot start."""

from __future__ import annotations

import pytest

from services.common.lifecycle import StartupError
from services.gateway.main import running_gateway
from tests.integration.gateway.gateways import fast_settings, running_stack


async def test_a_taken_port_is_named() -> None:
    async with running_stack([]) as first:
        port = first.gateway.http.port
        with pytest.raises(StartupError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use"):
            async with running_gateway(fast_settings(gateway_port=port, host="127.0.0.1")):
                pass
