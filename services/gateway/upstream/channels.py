"""Waiting for a gRPC channel, with an answer as soon as the peer refuses."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio


async def became_ready(channel: grpc.aio.Channel, timeout_s: float) -> bool:
    """True once the channel is connected; False when the first try fails or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            state = channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                # Left over from an earlier failure: this wait deserves a try of its own.
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
