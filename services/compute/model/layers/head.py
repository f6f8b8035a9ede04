"""Layers over a pooled state: those of a classifier, and the Dense modules of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from services.compute.backends.weights import Stacked
from services.compute.model.formats.safetensors import TensorFiles
from services.compute.model.loading.checkpoint import Checkpoint
from services.compute.model.loading.pooling import DenseHead
from services.compute.model.shard import Shard
from services.compute.model.spec import HeadActivation, ModelError, ModelSpec

_ACTIVATIONS: Mapping[HeadActivation, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class PooledLayer:
    """One layer, in float32: its matrices are small, and it computes one row for each request."""

    weight: Tensor  # [n_out, n_in]
    bias: Tensor | None  # [n_out]
    activation: HeadActivation
    norm: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return [n_out] of [n_in]."""
        x = _ACTIVATIONS[self.activation](F.linear(x, self.weight, self.bias))
        return x if self.norm is None else self.norm(x)


Head = tuple[PooledLayer, ...]


def load_classifier(spec: ModelSpec, source: Checkpoint, device: torch.device) -> Head:
    """Load the layers of the spec's classifier; () if it has none. Raises ModelError."""
    if spec.classifier is None:
        return ()
    layers, n_in = [], spec.hidden_size
    for index, layer in enumerate(spec.classifier.layers):
        key, n_out = f"classifier{index}", layer.n_out
        weight = Stacked((source.weight(Shard.whole(key, (n_out, n_in))),)).dense(torch.float32, device)
        bias = source.vector(f"{key}.bias", n_out).to(device, torch.float32) if layer.bias else None
        norm = _load_norm(spec, source, f"{key}_norm", n_out, device) if layer.norm else None
        layers.append(PooledLayer(weight, bias, layer.activation, norm))
        n_in = n_out
    return tuple(layers)


def _load_norm(
    spec: ModelSpec, source: Checkpoint, key: str, size: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    weight = source.vector(key, size).to(device, torch.float32)
    bias = source.vector(f"{key}.bias", size).to(device, torch.float32) if spec.norm_bias else None
    return lambda x: F.layer_norm(x, (size,), weight, bias, spec.norm_eps)


def load_dense(folder: Path, modules: Sequence[DenseHead], hidden_size: int, device: torch.device) -> Head:
    """Load the Dense modules of the checkpoint folder, each from a folder of its own. Raises ModelError."""
    layers, n_in = [], hidden_size
    for module in modules:
        if module.n_in != n_in:
            raise ModelError(f"{folder / module.folder}: in_features: expected {n_in}, found {module.n_in}")
        n_in = module.n_out
        files = TensorFiles(folder / module.folder, ())
        try:
            weight = files.slice("linear.weight", (module.n_out, module.n_in))[:]
            bias = files.slice("linear.bias", (module.n_out,))[:] if module.bias else None
        finally:
            files.close()
        floats = [None if tensor is None else tensor.to(device, torch.float32) for tensor in (weight, bias)]
        assert floats[0] is not None
        layers.append(PooledLayer(floats[0], floats[1], module.activation))
    return tuple(layers)
