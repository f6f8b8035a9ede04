"""The formats of the KV cache, a file each; their names and sizes are known without torch."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from services.compute.backends.shapes import KvSize

SIZES: dict[str, KvSize] = {
    module.name: import_module(f"{__name__}.{module.name}").FORMAT.size for module in iter_modules(__path__)
}
NAMES = tuple(SIZES)


def token_bytes(name: str, n_kv_heads: int, head_dim: int) -> int:
    """Return the bytes of a token in a layer."""
    size = SIZES[name]
    return 2 * n_kv_heads * (head_dim * size.bits // 8 + size.head)
