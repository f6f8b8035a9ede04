"""The sizes of one rank's attention and of its cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One rank's heads."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.n_heads // self.n_kv_heads


@dataclass(frozen=True, slots=True)
class KvShape:
    """One rank's heads in a layer, and the positions of a block."""

    block_tokens: int
    n_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Numbers of a token in a layer: K, then V."""
        return 2 * self.n_kv_heads * self.head_dim
