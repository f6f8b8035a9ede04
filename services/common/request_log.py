"""The log of requests from which capacity is planned: lengths, arrivals and hashes of prefixes, never a text.

Gateways write it and the planner reads it: a stream in Redis of bounded length and lifetime.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from redis.typing import EncodableT, FieldT

from services.common.blockhash import HASH_BLOCK_TOKENS

LOG_BLOCK_TOKENS = 64  # a hash of the log covers so many tokens
MAX_LOG_BLOCKS = 1024  # a longer prompt is logged without the hashes beyond
_EVERY = LOG_BLOCK_TOKENS // HASH_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One sequence that a worker has answered."""

    at: float  # arrival, seconds since the epoch
    model: str
    prompt_tokens: int
    answer_tokens: int
    tenant: str = ""  # digest
    session: str = ""  # digest
    blocks: tuple[int, ...] = ()  # one hash for each LOG_BLOCK_TOKENS tokens of the prompt, each of all tokens before

    def fields(self) -> dict[FieldT, EncodableT]:
        """The fields of its entry in the stream."""
        return {
            "at": f"{self.at:.3f}",
            "model": self.model,
            "prompt": self.prompt_tokens,
            "answer": self.answer_tokens,
            "tenant": self.tenant,
            "session": self.session,
            "blocks": struct.pack(f"<{len(self.blocks)}Q", *self.blocks),
        }

    @classmethod
    def read(cls, fields: Mapping[bytes, bytes]) -> LoggedRequest:
        """An entry of the stream."""
        blocks = fields.get(b"blocks", b"")
        return cls(
            float(fields[b"at"]),
            fields[b"model"].decode(),
            int(fields[b"prompt"]),
            int(fields[b"answer"]),
            fields.get(b"tenant", b"").decode(),
            fields.get(b"session", b"").decode(),
            struct.unpack(f"<{len(blocks) // 8}Q", blocks),
        )


def logged_blocks(hashes: Sequence[int]) -> tuple[int, ...]:
    """The hashes of the log, of those of all hash blocks."""
    return tuple(hashes[_EVERY - 1 :: _EVERY][:MAX_LOG_BLOCKS])


def digest_of(name: str) -> str:
    """The digest of a tenant's or a session's name; empty for an empty name."""
    return sha256(name.encode()).hexdigest()[:16] if name else ""
