"""Waits for a gRPC channel, and returns as soon as the peer refuses the connection."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio


async def became_ready(channel: grpc.aio.Channel, timeout_s: float) -> bool:
    """Wait for a connection; False when the first try fails or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            state = channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                # The state is of an earlier failure: wait for a new try.
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                    return False
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
            return True
    except TimeoutError:
        return False
