"""A conversation in the terminal: python examples/chat.py [url]."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import suppress

from ryzanstein_client import Client, Message, RyzansteinError, Settings


def questions() -> Iterator[str]:
    """The lines that the user types, until an empty line, Ctrl-D or Ctrl-C."""
    with suppress(EOFError, KeyboardInterrupt):
        while line := input("> "):
            yield line


def main() -> None:
    """Ask, stream the answer, remember both."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    # A session keeps the conversation on the worker that has its beginning in the cache.
    with Client(url, Settings(session_id=secrets.token_hex(8))) as client:
        turns: list[Message] = []
        for line in questions():
            turns.append(Message("user", line))
            try:
                with client.stream_chat(turns, max_tokens=100) as stream:
                    for chunk in stream:
                        print(chunk.text, end="", flush=True)
                turns.append(Message("assistant", stream.text))
            except RyzansteinError as error:
                print(f"\n[{error}]", end="")
                turns.pop()
            print()


if __name__ == "__main__":
    main()
