"""What a training run is made of: the shape of the model and the recipe, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ModelShape:
    """Shape of a Llama-architecture model with tied embeddings.

    `n_heads`, `n_kv_heads` and `ffn_size` divide by 4, so that the model shards over 1, 2 and 4 ranks.
    """

    hidden_size: int = 384
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 32
    ffn_size: int = 1024
    vocab_size: int = 4096
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def n_parameters(self) -> int:
        """Number of weights; the tied embedding counts once."""
        attention = 2 * self.hidden_size * self.head_dim * (self.n_heads + self.n_kv_heads)
        ffn = 3 * self.hidden_size * self.ffn_size
        norms = 2 * self.hidden_size
        return self.n_layers * (attention + ffn + norms) + self.vocab_size * self.hidden_size + self.hidden_size


@dataclass(frozen=True)
class Stage:
    """From `start` (a fraction of the run) on: sequences of `length` tokens, `chat` of them chat samples."""

    start: float
    length: int
    chat: float = 0.09


@dataclass(frozen=True)
class Recipe:
    """How the model is trained. Learning rates decay to zero at `steps`, or at `minutes` if that is sooner."""

    seed: int = 2_026
    steps: int = 6_000
    minutes: float | None = None
    batch_tokens: int = 8_192
    # Short sequences first: attention is the slowest part on a CPU, and most of what a small model learns is local.
    stages: tuple[Stage, ...] = (
        Stage(0.0, 512),
        Stage(0.45, 1024, chat=0.14),
        Stage(0.8, 2048, chat=0.14),
    )
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    adam_lr: float = 3e-3
    weight_decay: float = 0.05
    grad_clip: float = 1.0
    warmup: float = 0.02
    # Warm up, hold, decay: the last `decay` of the run brings the rate to zero.
    decay: float = 0.5
    # Shares of what is not chat.
    mixture: dict[str, float] = field(default_factory=lambda: {"library": 0.5, "tests": 0.31, "documentation": 0.19})

    def stage_at(self, progress: float) -> Stage:
        """The stage at `progress` (0..1)."""
        return [stage for stage in self.stages if stage.start <= progress][-1]

    def shares_in(self, stage: Stage) -> dict[str, float]:
        """Share of every group, chat included, in a stage's batches; they sum to 1."""
        others = {name: share * (1 - stage.chat) for name, share in self.mixture.items()}
        return {**others, "chat": stage.chat}


@dataclass(frozen=True)
class RunPaths:
    """Where a run leaves what it makes; `training` is scratch and is not shipped."""

    out: Path

    @property
    def training(self) -> Path:
        """Checkpoints and the token cache."""
        return self.out / "training"

    @property
    def checkpoint(self) -> Path:
        """The latest resumable checkpoint."""
        return self.training / "checkpoint.pt"

    @property
    def log(self) -> Path:
        """One JSON line per logged step."""
        return self.training / "log.jsonl"
