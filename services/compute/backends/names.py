"""Names that a model's configuration and a backend share. Free of torch."""

from __future__ import annotations

from typing import Literal

# "xielu" has numbers of each layer; "clamped_silu" only gates, as in gpt-oss.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "clamped_silu"]

# Where a layer multiplies its results by a curve of z: before their norm, after it, or without a norm.
Gate = Literal["inside", "outside", "plain"]
GateCurve = Literal["silu", "sigmoid"]
