"""Describes the tower of a model that sees. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.compute.backends.names import Activation


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """A tower that turns frames of an image into rows of the decoder: SigLIP (arXiv:2303.15343), or one of Qwen's.

    The tower sees a frame's patches, each as a row. The projection makes one row of every square of
    `square` x `square` patches: of all their numbers (pixel shuffle, arXiv:1609.05158), or of the mean's norm.
    """

    layout: Literal["idefics3", "gemma3", "qwen2_5_vl"]  # how gateways cut images into frames
    image_token: int  # id that stands for a row of an image in a prompt
    frame_size: int  # side of a frame, pixels; 0: frames have any sides
    patch_size: int  # side of a patch, pixels
    square: int  # side of the square of patches that becomes a row, patches
    hidden_size: int
    ffn_size: int
    n_heads: int
    n_layers: int
    activation: Activation
    norm_eps: float
    tower: str  # prefix of the stored names of the tower's tensors
    projection: str = ""  # stored name of the projection; "": frames have any sides
    mean_norm: str = ""  # stored name of the RMS norm of a square's mean; "": its patches are projected side by side
    bucketed: bool = False  # positions of patches are buckets of places from 0 to 1
    sees_ahead: bool = False  # the decoder's rows of a frame attend to all rows of the frame
    most_patches: int = 0  # patches of the largest frame with any sides
    window: int = 0  # side of the windows within which patches attend, in squares of patches; 0: they attend to all
    full_layers: tuple[int, ...] = ()  # layers without windows
    table_side: int = 0  # side of a table of learned positions, which is stretched to the patches of a frame; 0: none
    # Layers whose squares also become rows: the decoder adds them to its own after its first layers, one after each
    # (DeepStack, arXiv:2406.04334).
    deep_layers: tuple[int, ...] = ()

    @property
    def frame_patches(self) -> int:
        """Rows of the tower for the largest frame."""
        return self.most_patches or (self.frame_size // self.patch_size) ** 2

    @property
    def cell(self) -> int:
        """Side of the square of pixels that becomes a row of the decoder."""
        return self.patch_size * self.square

    @property
    def frame_tokens(self) -> int:
        """Rows of the decoder for the largest frame."""
        return self.frame_patches // self.square**2

    @property
    def frame_bytes(self) -> int:
        """Bytes of the largest frame's pixels: a byte for red, green and blue each."""
        return 3 * self.frame_patches * self.patch_size**2
