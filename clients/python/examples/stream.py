"""Several completions at once: python examples/stream.py [url]."""

from __future__ import annotations

import asyncio
import sys

from ryzanstein_client import AsyncClient, Completion, RateLimited, StreamInterrupted

PROMPTS = ("A router decides", "A worker generates", "A gateway detokenizes")


async def generate(client: AsyncClient, prompt: str) -> Completion | str:
    """A completion; or the part of it that came."""
    try:
        async with client.stream_completion(prompt, max_tokens=40, temperature=0.7, seed=1) as stream:
            async for chunk in stream:
                print(f"{prompt[:12]:<12} {chunk.text!r}")
        return stream.completion()
    except StreamInterrupted as error:
        return f"{error.text} [{error}]"
    except RateLimited as error:
        return f"[come back in {error.retry_after} s]"


async def main() -> None:
    """Stream all prompts on one connection pool."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    async with AsyncClient(url) as client:
        for result in await asyncio.gather(*(generate(client, prompt) for prompt in PROMPTS)):
            print(result)


if __name__ == "__main__":
    asyncio.run(main())
