"""The tower of Qwen 2.5 VL: images of any size, whose patches attend within windows in most layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from services.compute.backends.base import Norm
from services.compute.model.layers.vision import CHANNELS, Layer, Stored
from services.compute.model.spec import VisionSpec

_THETA = 10_000.0
_TIMES = 2  # pictures that a patch of the stored kernel covers; an image is both of them


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """The patches of an image, square by square, and the squares line by line."""

    cos: Tensor  # [n_patches, 1, head_dim / 2] float32
    sin: Tensor
    windows: tuple[Tensor, ...]  # [n_windows, n_patches of each] int64: the windows of a size

    @classmethod
    def of(cls, spec: VisionSpec, lines: int, columns: int, device: torch.device) -> PatchGrid:
        """Return the grid of an image of `lines` x `columns` squares of patches."""
        square, squares = spec.square, torch.arange(lines * columns).view(lines, columns)
        inside = torch.arange(square)
        y = torch.arange(lines).view(-1, 1, 1, 1) * square + inside.view(1, 1, -1, 1)
        x = torch.arange(columns).view(1, -1, 1, 1) * square + inside.view(1, 1, 1, -1)
        shape = (lines, columns, square, square)
        places = torch.stack((y.expand(shape).flatten(), x.expand(shape).flatten()), 1)  # [n_patches, 2]
        quarter = spec.hidden_size // spec.n_heads // 4
        angles = places.unsqueeze(-1).float() / _THETA ** (torch.arange(quarter).float() / quarter)
        angles = angles.flatten(1).unsqueeze(1)  # [n_patches, 1, head_dim / 2]
        sized: dict[int, list[Tensor]] = {}
        for top, left in product(range(0, lines, spec.window), range(0, columns, spec.window)):
            window = squares[top : top + spec.window, left : left + spec.window]
            patches = window.flatten().unsqueeze(1) * square**2 + torch.arange(square**2)
            sized.setdefault(patches.numel(), []).append(patches.flatten())
        windows = tuple(torch.stack(of_size).to(device) for of_size in sized.values())
        return cls(angles.cos().to(device), angles.sin().to(device), windows)

    def turn(self, x: Tensor) -> Tensor:
        """Return [n_patches, n_heads, head_dim] turned by the patches' places."""
        first, second = x.float().chunk(2, -1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, -1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class WindowedLayer:
    """Attention, and a gated MLP, each after a norm."""

    norm1: Norm
    qkv: Layer
    out: Layer
    norm2: Norm
    gate: Layer
    up: Layer
    down: Layer
    activation: Callable[[Tensor], Tensor]
    n_heads: int
    full: bool  # patches attend to all others, not within windows

    def __call__(self, x: Tensor, grid: PatchGrid) -> Tensor:
        """Return the residual stream [n_patches, hidden] after this layer."""
        parts = self.qkv(self.norm1(x)).view(len(x), 3, self.n_heads, -1)
        q, k, v = grid.turn(parts[:, 0]), grid.turn(parts[:, 1]), parts[:, 2]
        attended = torch.empty_like(q)
        everything = (torch.arange(len(x), device=x.device).unsqueeze(0),)
        for windows in everything if self.full else grid.windows:
            queries, keys, values = (part[windows].transpose(1, 2) for part in (q, k, v))
            attended[windows] = F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)
        x = x + self.out(attended.flatten(1))
        normed = self.norm2(x)
        return x + self.down(self.activation(self.gate(normed)) * self.up(normed))


@dataclass(frozen=True, slots=True)
class WindowedTower:
    """Computes each image alone."""

    spec: VisionSpec
    mean: Tensor  # [3], of pixels from 0 to 1
    std: Tensor  # [3]
    patches: Layer
    layers: tuple[WindowedLayer, ...]
    norm: Norm
    inner: Layer
    outer: Layer

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def places(self) -> bool:
        """Rows of images have places in the decoder."""
        return True

    @torch.inference_mode()
    def __call__(self, x: Tensor, start: int, stop: int, columns: int) -> Tensor:
        """As `VisionTower`, for an image with `columns` rows of the decoder side by side."""
        n_patches = len(x) if start else len(x) // (CHANNELS * self.spec.patch_size**2)
        lines = n_patches // self.spec.square**2 // columns
        x = x if start else self._embed(x, lines, columns)
        grid = PatchGrid.of(self.spec, lines, columns, x.device)
        for layer in self.layers[start:stop]:
            x = layer(x, grid)
        return x if stop < self.n_layers else self._project(x)

    def _embed(self, pixels: Tensor, lines: int, columns: int) -> Tensor:
        square, side = self.spec.square, self.spec.patch_size
        normal = (pixels.view(-1, CHANNELS).to(self.mean.device).float() / 255 - self.mean) / self.std
        cut = normal.view(lines, square, side, columns, square, side, CHANNELS).permute(0, 3, 1, 4, 6, 2, 5)
        return self.patches(cut.reshape(lines * columns * square**2, -1))

    def _project(self, x: Tensor) -> Tensor:
        squares = self.norm(x).view(-1, self.spec.square**2 * self.spec.hidden_size)
        return self.outer(F.gelu(self.inner(squares)))


def load_windowed(
    spec: VisionSpec, stored: Stored, hidden_size: int, mean: Sequence[float], std: Sequence[float]
) -> WindowedTower:
    """Load the tower for a decoder with `hidden_size`. Raises ModelError."""
    hidden, ffn, ops, side = spec.hidden_size, spec.ffn_size, stored.backend.ops, spec.patch_size

    def norm(name: str) -> Norm:
        return ops.rms_norm(stored.tensor(f"{stored.prefix}{name}.weight", hidden).float(), spec.norm_eps)

    def layer(index: int) -> WindowedLayer:
        at = f"blocks.{index}."
        return WindowedLayer(
            norm(f"{at}norm1"),
            stored.linear(f"{at}attn.qkv", 3 * hidden, hidden),
            stored.linear(f"{at}attn.proj", hidden, hidden),
            norm(f"{at}norm2"),
            stored.linear(f"{at}mlp.gate_proj", ffn, hidden),
            stored.linear(f"{at}mlp.up_proj", ffn, hidden),
            stored.linear(f"{at}mlp.down_proj", hidden, ffn),
            ops.activation(spec.activation),
            spec.n_heads,
            index in spec.full_layers,
        )

    kernel = stored.tensor(f"{stored.prefix}patch_embed.proj.weight", hidden, CHANNELS, _TIMES, side, side)
    summed = kernel.float().sum(2).flatten(1).to(kernel.dtype)
    wide, device = hidden * spec.square**2, stored.backend.device
    return WindowedTower(
        spec,
        torch.tensor(mean, device=device),
        torch.tensor(std, device=device),
        lambda cut: F.linear(cut.to(summed.dtype), summed),
        tuple(layer(index) for index in range(spec.n_layers)),
        norm("merger.ln_q"),
        stored.linear("merger.mlp.0", wide, wide),
        stored.linear("merger.mlp.2", hidden_size, wide),
    )
