"""Chained hashes of prompt blocks, by which workers, router and coordinator name prefixes.

A block's hash covers all tokens before it, so that equal hashes mean equal prefixes. The block size is a constant of
the protocol, not the size of a device's KV block, so that hashes do not depend on the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

HASH_BLOCK_TOKENS = 16


class ImageSpan(NamedTuple):
    """An image in a sequence of tokens, which are the same for every image of its size."""

    first: int  # position of its first token
    end: int  # position after its last one
    digest: bytes


def image_digest(frames: bytes, columns: int = 0) -> bytes:
    """The digest of an image: of its pixels, and of the placeholders side by side in a frame of any sides."""
    return sha256(frames + (columns.to_bytes(4, "little") if columns else b"")).digest()


@lru_cache  # the same for all prompts of a tenant
def chain_root(hash_root: str, cache_salt: str = "") -> bytes:
    """The parent of a first block: the model card's `hash_root` and the tenant's salt."""
    return sha256(f"{hash_root}\0{cache_salt}".encode()).digest()


def adapted_root(hash_root: str, digest: str) -> str:
    """The hash root of a model with an adapter, whose KV differs from the base's and from other adapters'."""
    return f"{hash_root}:{digest}" if digest else hash_root


def extend_chain(
    parent: bytes, token_ids: Sequence[int], images: Sequence[ImageSpan] = (), first: int = 0
) -> list[bytes]:
    """Digests of the full blocks of `token_ids`, whose first token, at position `first`, follows the block `parent`.

    The digests of `images` are part of the blocks that hold their tokens.
    """
    tokens = memoryview(array("I", token_ids)).cast("B")
    width = HASH_BLOCK_TOKENS * 4
    digests = []
    for start in range(0, len(tokens) - width + 1, width):
        block = parent + tokens[start : start + width]
        if images:
            at = first + start // 4
            seen = (image.digest for image in images if image.first < at + HASH_BLOCK_TOKENS and at < image.end)
            block += b"".join(seen)
        parent = sha256(block).digest()
        digests.append(parent)
    return digests


def wire_hash(digest: bytes) -> int:
    """The first 64 bits of a digest, as services exchange them."""
    return int.from_bytes(digest[:8], "little")


def wire_chain(
    hash_root: str, cache_salt: str, token_ids: Sequence[int], images: Sequence[ImageSpan] = ()
) -> list[int]:
    """Hashes of all full blocks of a prompt as services exchange them, parents first."""
    return [wire_hash(digest) for digest in extend_chain(chain_root(hash_root, cache_salt), token_ids, images)]
