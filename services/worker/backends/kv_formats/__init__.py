"""The formats of the KV cache, a file each; their names and sizes are known without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes in the cache."""

    number: int
    head: int = 0  # of what is stored beside the numbers of a token's head of K or V


SIZES = {
    "bfloat16": Size(2),
    "float16": Size(2),
    "float32": Size(4),
    "fp8": Size(1, head=2),
    "int8": Size(1, head=2),
}
NAMES = tuple(SIZES)


def token_bytes(name: str, n_kv_heads: int, head_dim: int) -> int:
    """Return the bytes of a token in a layer."""
    size = SIZES[name]
    return 2 * n_kv_heads * (head_dim * size.number + size.head)
