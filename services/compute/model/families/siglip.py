"""Reads the settings of SigLIP towers (arXiv:2303.15343)."""

from __future__ import annotations

from typing import Any

from services.compute.model.families.config import MAX_LAYERS, Config
from services.compute.model.families.llama import ACTIVATIONS
from services.compute.model.vision import VisionSpec


def read_siglip(tower: Config, /, hidden_size: int, n_heads: int, patch_size: int, **use: Any) -> VisionSpec:
    """Read a `vision_config` whose absent keys have these values, or those of transformers. Raises ModelError.

    `use`: the fields of VisionSpec that say how the decoder uses the tower.
    """
    tower.require("num_channels", 3)
    hidden, heads = tower.integer("hidden_size", hidden_size), tower.integer("num_attention_heads", n_heads)
    if hidden % heads:
        raise tower.error("num_attention_heads", f"expected a divisor of hidden_size {hidden}, found {heads}")
    frame, patch = tower.integer("image_size", 224), tower.integer("patch_size", patch_size)
    if frame % (patch * use["square"]):
        raise tower.error("image_size", f"expected a multiple of {use['square']} patches of {patch} pixels")
    return VisionSpec(
        frame_size=frame,
        patch_size=patch,
        hidden_size=hidden,
        ffn_size=tower.integer("intermediate_size", 3072),
        n_heads=heads,
        n_layers=tower.integer("num_hidden_layers", 12, at_most=MAX_LAYERS),
        activation=tower.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
        norm_eps=tower.number("layer_norm_eps", 1e-6),
        **use,
    )
