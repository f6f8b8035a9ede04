"""The norms of the residual stream."""

from __future__ import annotations

from services.worker.backends.base import Norm
from services.worker.model.layers.linear import LinearLoader
from services.worker.model.spec import ModelSpec


def load_norm(spec: ModelSpec, load: LinearLoader, key: str) -> Norm:
    """Return the norm over hidden_size with the weights stored under `key`."""
    backend = load.backend
    weight = load.source.vector(key, spec.hidden_size).to(backend.device).float() + spec.norm_offset
    if spec.norm == "rms":
        return backend.ops.rms_norm(weight, spec.norm_eps)
    bias = None
    if spec.norm_bias:
        bias = load.source.vector(f"{key}.bias", spec.hidden_size).to(backend.device, backend.dtype)
    return backend.ops.layer_norm(weight.to(backend.dtype), bias, spec.norm_eps)
