"""Loads the mixers of layers with a state."""

from __future__ import annotations

from services.compute.model.layers.convolution import ShortConvLayer, load_short_conv
from services.compute.model.layers.delta import DeltaLayer, load_delta
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.layers.mamba import MambaLayer, load_mamba
from services.compute.model.layers.mamba2 import Mamba2Layer, load_mamba2
from services.compute.model.mixers import DeltaNet, Mamba, Mixer, ShortConv
from services.compute.model.spec import ModelSpec

StateLayer = ShortConvLayer | Mamba2Layer | DeltaLayer | MambaLayer


def load_mixer(spec: ModelSpec, mixer: Mixer, load: LinearLoader, index: int) -> StateLayer:
    """Load layer `index`'s mixer. Raises ModelError."""
    if isinstance(mixer, ShortConv):
        return load_short_conv(spec, mixer, load, index)
    if isinstance(mixer, DeltaNet):
        return load_delta(spec, mixer, load, index)
    if isinstance(mixer, Mamba):
        return load_mamba(spec, mixer, load, index)
    return load_mamba2(spec, mixer, load, index)
