"""Chained hashes of prompt blocks, by which workers, router and coordinator name prefixes.

A block's hash covers all tokens before it, so that equal hashes mean equal prefixes. The block size is a constant of
the protocol, not the size of a device's KV block, so that hashes do not depend on the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

HASH_BLOCK_TOKENS = 16


def chain_root(hash_root: str, cache_salt: str = "") -> bytes:
    """The parent of a first block: the model card's `hash_root` and the tenant's salt."""
    return sha256(f"{hash_root}\0{cache_salt}".encode()).digest()


def adapted_root(hash_root: str, digest: str) -> str:
    """The hash root of a model with an adapter, whose KV differs from the base's and from other adapters'."""
    return f"{hash_root}:{digest}" if digest else hash_root


def extend_chain(parent: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """Digests of the full blocks of `token_ids`, whose first token follows the block `parent`."""
    tokens = memoryview(array("I", token_ids)).cast("B")
    width = HASH_BLOCK_TOKENS * 4
    digests = []
    for start in range(0, len(tokens) - width + 1, width):
        parent = sha256(parent + tokens[start : start + width]).digest()
        digests.append(parent)
    return digests


def wire_hash(digest: bytes) -> int:
    """The first 64 bits of a digest, as services exchange them."""
    return int.from_bytes(digest[:8], "little")


def wire_chain(hash_root: str, cache_salt: str, token_ids: Sequence[int]) -> list[int]:
    """Hashes of all full blocks of a prompt as services exchange them, parents first."""
    return [wire_hash(digest) for digest in extend_chain(chain_root(hash_root, cache_salt), token_ids)]
