"""The sizes of one rank's attention, of its cache and of its experts."""

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


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """One rank's gated experts of a mixture, and how rows are sent to those of all ranks."""

    numbers: range  # of this rank's experts among all
    hidden_size: int
    ffn_size: int
    n_active: int  # experts that a row is sent to: those with the largest softmax over all
    normalise: bool  # divide the weights of those by their sum
