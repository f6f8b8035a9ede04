"""Names that a model's configuration and a backend share. Free of torch."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
