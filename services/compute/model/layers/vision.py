"""The tower of a model that sees: frames of images become rows of the decoder. Nothing is cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from services.compute.backends.base import ModelBackend
from services.compute.model.formats.safetensors import TensorFiles
from services.compute.model.spec import ModelError
from services.compute.model.vision import VisionSpec

CHANNELS = 3

Layer = Callable[[Tensor], Tensor]  # [..., n_in] -> [..., n_out]


@dataclass(frozen=True, slots=True)
class TowerLayer:
    """Attention of all patches of a frame to each other, and an MLP, each after a layer norm."""

    norm1: Layer
    q: Layer
    k: Layer
    v: Layer
    out: Layer
    norm2: Layer
    up: Layer
    down: Layer
    activation: Layer
    n_heads: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return the residual stream [n_patches, hidden] of a frame after this layer."""
        normed = self.norm1(x)
        shape = (len(x), self.n_heads, -1)
        q, k, v = (part(normed).view(shape).transpose(0, 1) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
        return x + self.down(self.activation(self.up(self.norm2(x))))


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Computes each frame alone, so that its rows do not depend on the other frames of a step."""

    spec: VisionSpec
    mean: Tensor  # [3], of pixels from 0 to 1
    std: Tensor  # [3]
    patches: Layer
    positions: Tensor  # [n_patches, hidden]
    layers: tuple[TowerLayer, ...]
    norm: Layer
    projection: Layer  # [n_rows, square ** 2, hidden] -> [n_rows, hidden_size], from the patches of each square

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def places(self) -> bool:
        """Rows of images have no places but their positions in the decoder."""
        return False

    @torch.inference_mode()
    def __call__(self, x: Tensor, start: int, stop: int, columns: int) -> Tensor:
        """Compute the layers from `start` to `stop` of a frame; divided or not, they yield the same bits.

        `columns`: rows of the decoder side by side in the frame.
        `x`: for layer 0 the frame's pixels, flat uint8 [frame_bytes], else the residual stream, [n_patches, hidden].
        Returns that stream, or after the last layer the decoder's rows, [frame_tokens, hidden_size].
        """
        x = x if start else self._embed(x)
        for layer in self.layers[start:stop]:
            x = layer(x)
        return x if stop < self.n_layers else self._project(x)

    def _embed(self, pixels: Tensor) -> Tensor:
        """Return the patches of a frame, [n_patches, hidden]."""
        spec = self.spec
        normal = (pixels.view(-1, CHANNELS).to(self.mean.device).float() / 255 - self.mean) / self.std
        n, side = spec.frame_size // spec.patch_size, spec.patch_size
        cut = normal.view(n, side, n, side, CHANNELS).permute(0, 2, 4, 1, 3).reshape(n * n, -1)
        return self.patches(cut.to(self.positions.dtype)) + self.positions

    def _project(self, x: Tensor) -> Tensor:
        """Return the decoder's rows of a frame's residual stream."""
        square = self.spec.square
        rows = self.spec.frame_size // self.spec.patch_size // square
        squares = self.norm(x).view(rows, square, rows, square, -1).transpose(1, 2)
        return self.projection(squares.reshape(rows * rows, square * square, -1))


@dataclass(frozen=True, slots=True)
class Stored:
    """The tower's tensors by their names behind `prefix`."""

    files: TensorFiles
    prefix: str
    backend: ModelBackend

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the served dtype. Raises ModelError."""
        if name not in self.files.names:
            raise ModelError(f"{self.files.folder}: {name}: missing")
        stored = self.files.slice(name, shape)[:]
        tensor: Tensor = stored.to(self.backend.device, self.backend.dtype)
        if not torch.isfinite(tensor).all():
            raise ModelError(f"{self.files.file(name)}: {name}: not finite in {self.backend.dtype}")
        return tensor

    def linear(self, name: str, n_out: int, n_in: int) -> Layer:
        """Return a product with a bias. Raises ModelError."""
        name = self.prefix + name
        bias = self.tensor(f"{name}.bias", n_out)
        return partial(F.linear, weight=self.tensor(f"{name}.weight", n_out, n_in), bias=bias)

    def norm(self, name: str, size: int, eps: float) -> Layer:
        """Return a layer norm. Raises ModelError."""
        name = self.prefix + name
        weight, bias = self.tensor(f"{name}.weight", size), self.tensor(f"{name}.bias", size)
        return partial(F.layer_norm, normalized_shape=(size,), weight=weight, bias=bias, eps=eps)


def load_vision(
    spec: VisionSpec, stored: Stored, hidden_size: int, mean: Sequence[float], std: Sequence[float]
) -> VisionTower:
    """Load the tower for a decoder with `hidden_size`. Raises ModelError."""
    hidden, ffn, eps, side = spec.hidden_size, spec.ffn_size, spec.norm_eps, spec.patch_size

    def layer(index: int) -> TowerLayer:
        at = f"encoder.layers.{index}."
        q, k, v, out = (stored.linear(f"{at}self_attn.{part}_proj", hidden, hidden) for part in ("q", "k", "v", "out"))
        return TowerLayer(
            stored.norm(f"{at}layer_norm1", hidden, eps),
            *(q, k, v, out),
            stored.norm(f"{at}layer_norm2", hidden, eps),
            stored.linear(f"{at}mlp.fc1", ffn, hidden),
            stored.linear(f"{at}mlp.fc2", hidden, ffn),
            stored.backend.ops.activation(spec.activation),
            spec.n_heads,
        )

    name = f"{stored.prefix}embeddings.patch_embedding"
    kernel = stored.tensor(f"{name}.weight", hidden, CHANNELS, side, side)
    table = stored.tensor(f"{stored.prefix}embeddings.position_embedding.weight", spec.frame_patches, hidden)
    positions = _bucketed(spec.frame_size // side) if spec.bucketed else torch.arange(spec.frame_patches)
    device = stored.backend.device
    return VisionTower(
        spec,
        torch.tensor(mean, device=device),
        torch.tensor(std, device=device),
        partial(F.linear, weight=kernel.flatten(1), bias=stored.tensor(f"{name}.bias", hidden)),
        table[positions.to(device)],
        tuple(layer(index) for index in range(spec.n_layers)),
        stored.norm("post_layernorm", hidden, eps),
        _projection(spec, stored, hidden_size),
    )


def _projection(spec: VisionSpec, stored: Stored, hidden_size: int) -> Layer:
    """Return the projection of squares of patches to rows of the decoder."""
    hidden = spec.hidden_size
    if not spec.mean_norm:
        weight = stored.tensor(spec.projection, hidden_size, hidden * spec.square**2)
        return lambda squares: F.linear(squares.flatten(1), weight)
    weight = stored.tensor(spec.projection, hidden, hidden_size).T.contiguous()
    norm = stored.backend.ops.rms_norm(stored.tensor(spec.mean_norm, hidden).float() + 1, spec.norm_eps)
    return lambda squares: F.linear(norm(squares.mean(1)), weight)


def _bucketed(n: int) -> Tensor:
    """Return the position [n * n] of each patch of a frame with `n` patches on a side.

    The models were trained with places from 0 to 1 that are sorted into n buckets: in float32 the place of a patch on a
    bucket's edge may belong to the bucket before (arXiv:2307.06304).
    """
    edges = torch.arange(1 / n, 1.0, 1 / n)
    places = (torch.arange(n, dtype=torch.float32) * (1.0 / torch.tensor(n))).clamp(max=1.0 - 1e-6)
    buckets = torch.bucketize(places, edges, right=True)
    return (buckets[:, None] * n + buckets).flatten()
