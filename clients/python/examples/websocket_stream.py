"""A stream that outlives its connection: python examples/websocket_stream.py [url]. Restart your network meanwhile."""

from __future__ import annotations

import asyncio
import sys

from ryzanstein_client.websocket import WebSocketClient


async def main() -> None:
    """Print tokens as they come."""
    url = sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8000"
    async with WebSocketClient(url) as client:
        stream = client.stream_completion("Once upon a time", max_tokens=60, ignore_eos=True)
        async for chunk in stream:
            print(chunk.text, end="", flush=True)
        usage = stream.completion().usage
        print(f"\n[{usage.completion_tokens} tokens]")


if __name__ == "__main__":
    asyncio.run(main())
