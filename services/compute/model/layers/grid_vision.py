"""The towers of Qwen 2.5 VL and Qwen 3 VL: images of any size, whose patches turn by their lines and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from services.compute.model.layers.vision import CHANNELS, Layer, Stored
from services.compute.model.vision import VisionSpec

_THETA = 10_000.0
_TIMES = 2  # pictures that a patch of the stored kernel covers; an image is both of them


def _by_squares(grid: Tensor, square: int) -> Tensor:
    """Return the patches [lines * columns, ...] of a grid [lines, columns, ...], square by square."""
    lines, columns, *rest = grid.shape
    cut = grid.reshape(lines // square, square, columns // square, square, *rest)
    return cut.transpose(1, 2).flatten(0, 3)


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
        y, x = torch.meshgrid(torch.arange(lines * square), torch.arange(columns * square), indexing="ij")
        places = _by_squares(torch.stack((y, x), 2), square)  # [n_patches, 2]
        quarter = spec.hidden_size // spec.n_heads // 4
        angles = places.unsqueeze(-1).float() / _THETA ** (torch.arange(quarter).float() / quarter)
        angles = angles.flatten(1).unsqueeze(1)  # [n_patches, 1, head_dim / 2]
        sized: dict[int, list[Tensor]] = {}
        side = spec.window or max(lines, columns)
        for top, left in product(range(0, lines, side), range(0, columns, side)):
            window = squares[top : top + side, left : left + side]
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
class GridLayer:
    """Attention and an MLP, each after a norm."""

    norm1: Layer
    qkv: Layer
    out: Layer
    norm2: Layer
    mlp: Layer
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
        return x + self.mlp(self.norm2(x))


@dataclass(frozen=True, slots=True)
class GridTower:
    """Computes each image alone."""

    spec: VisionSpec
    mean: Tensor  # [3], of pixels from 0 to 1
    std: Tensor  # [3]
    patches: Layer
    table: Tensor | None  # learned positions, [1, hidden, table_side, table_side]
    layers: tuple[GridLayer, ...]
    merge: Layer  # [n_patches, hidden] -> [n_rows, hidden_size], from the patches of each square
    deep: Mapping[int, Layer]  # likewise, by the layer whose residual stream is merged

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
        """As `VisionTower`, for an image with `columns` rows of the decoder side by side.

        The rows of deep layers stand behind the others, [n_rows, (1 + n_deep) * hidden_size]. Until then a square's
        patches have equal parts of them behind the residual stream.
        """
        spec = self.spec
        n_patches = len(x) if start else len(x) // (CHANNELS * spec.patch_size**2)
        n_rows = n_patches // spec.square**2
        lines = n_rows // columns
        x = x if start else self._embed(x, lines, columns)
        width = spec.hidden_size
        stream, rows = x[:, :width].contiguous(), x[:, width:].reshape(n_rows, (x.shape[1] - width) * spec.square**2)
        grid = PatchGrid.of(spec, lines, columns, x.device)
        for number in range(start, stop):
            stream = self.layers[number](stream, grid)
            if number in self.deep:
                rows = torch.cat((rows, self.deep[number](stream)), 1)
        if stop == self.n_layers:
            return torch.cat((self.merge(stream), rows), 1)
        return torch.cat((stream, rows.view(n_patches, rows.shape[1] // spec.square**2)), 1)

    def _embed(self, pixels: Tensor, lines: int, columns: int) -> Tensor:
        """Return the patches of an image, [n_patches, hidden]."""
        square, side = self.spec.square, self.spec.patch_size
        normal = (pixels.view(-1, CHANNELS).to(self.mean.device).float() / 255 - self.mean) / self.std
        cut = normal.view(lines, square, side, columns, square, side, CHANNELS).permute(0, 3, 1, 4, 6, 2, 5)
        embedded = self.patches(cut.reshape(lines * columns * square**2, -1))
        if self.table is None:
            return embedded
        size = (lines * square, columns * square)
        (stretched,) = F.interpolate(self.table.float(), size, mode="bilinear", align_corners=True)
        return embedded + _by_squares(stretched.permute(1, 2, 0), square).to(embedded.dtype)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads the parts of a tower, by their stored names."""

    spec: VisionSpec
    stored: Stored
    hidden_size: int  # the decoder's

    @property
    def wide(self) -> int:
        """Numbers of a square's patches."""
        return self.spec.hidden_size * self.spec.square**2

    def norm(self, name: str, size: int) -> Layer:
        """Return a norm: of the root mean square in towers with windows."""
        if not self.spec.window:
            return self.stored.norm(name, size, self.spec.norm_eps)
        weight = self.stored.tensor(f"{self.stored.prefix}{name}.weight", size)
        return self.stored.backend.ops.rms_norm(weight.float(), self.spec.norm_eps)

    def patches(self) -> Layer:
        """Return the product with the pixels of a patch, [n_patches, 3 * patch_size ** 2]."""
        hidden, side, name = self.spec.hidden_size, self.spec.patch_size, f"{self.stored.prefix}patch_embed.proj"
        kernel = self.stored.tensor(f"{name}.weight", hidden, CHANNELS, _TIMES, side, side)
        weight = kernel.float().sum(2).flatten(1).to(kernel.dtype)
        bias = None if self.spec.window else self.stored.tensor(f"{name}.bias", hidden)
        return lambda cut: F.linear(cut.to(weight.dtype), weight, bias)

    def table(self) -> Tensor | None:
        """Return the learned positions as a picture."""
        if not (side := self.spec.table_side):
            return None
        stored = self.stored.tensor(f"{self.stored.prefix}pos_embed.weight", side**2, self.spec.hidden_size)
        return stored.T.reshape(1, -1, side, side)

    def layer(self, index: int) -> GridLayer:
        """Return a layer."""
        at, hidden = f"blocks.{index}.", self.spec.hidden_size
        return GridLayer(
            self.norm(f"{at}norm1", hidden),
            self.stored.linear(f"{at}attn.qkv", 3 * hidden, hidden),
            self.stored.linear(f"{at}attn.proj", hidden, hidden),
            self.norm(f"{at}norm2", hidden),
            self._gated(f"{at}mlp.") if self.spec.window else self._plain(f"{at}mlp."),
            self.spec.n_heads,
            index in self.spec.full_layers,
        )

    def merger(self, at: str, names: Sequence[str], size: int) -> Layer:
        """Return the product of squares of patches; `names` of its norm, of `size` numbers, and of its two layers."""
        wide, (norm, inner, outer) = self.wide, (at + name for name in names)
        normed, first = self.norm(norm, size), self.stored.linear(inner, wide, wide)
        second = self.stored.linear(outer, self.hidden_size, wide)
        return lambda x: second(F.gelu(first(normed(x.view(-1, size)).view(-1, wide))))

    def _gated(self, at: str) -> Layer:
        hidden, ffn, act = self.spec.hidden_size, self.spec.ffn_size, self._activation()
        gate, up = (self.stored.linear(f"{at}{part}_proj", ffn, hidden) for part in ("gate", "up"))
        down = self.stored.linear(f"{at}down_proj", hidden, ffn)
        return lambda x: down(act(gate(x)) * up(x))

    def _plain(self, at: str) -> Layer:
        hidden, ffn, act = self.spec.hidden_size, self.spec.ffn_size, self._activation()
        up = self.stored.linear(f"{at}linear_fc1", ffn, hidden)
        down = self.stored.linear(f"{at}linear_fc2", hidden, ffn)
        return lambda x: down(act(up(x)))

    def _activation(self) -> Layer:
        return self.stored.backend.ops.activation(self.spec.activation)


def load_grid(
    spec: VisionSpec, stored: Stored, hidden_size: int, mean: Sequence[float], std: Sequence[float]
) -> GridTower:
    """Load the tower for a decoder with `hidden_size`. Raises ModelError."""
    load, device = _Loader(spec, stored, hidden_size), stored.backend.device
    parts = ("norm", "linear_fc1", "linear_fc2")
    names = ("ln_q", "mlp.0", "mlp.2") if spec.window else parts
    return GridTower(
        spec,
        torch.tensor(mean, device=device),
        torch.tensor(std, device=device),
        load.patches(),
        load.table(),
        tuple(load.layer(index) for index in range(spec.n_layers)),
        load.merger("merger.", names, spec.hidden_size),
        {
            layer: load.merger(f"deepstack_merger_list.{number}.", parts, load.wide)
            for number, layer in enumerate(spec.deep_layers)
        },
    )
