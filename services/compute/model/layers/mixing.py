"""Loads the mixers of layers with a state."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.backends.base import Step
from services.compute.model.layers.attention import AttentionLayer
from services.compute.model.layers.convolution import ShortConvLayer, load_short_conv
from services.compute.model.layers.delta import DeltaLayer, load_delta
from services.compute.model.layers.lightning import LightningLayer, load_lightning
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.layers.mamba import MambaLayer, load_mamba
from services.compute.model.layers.mamba2 import Mamba2Layer, load_mamba2
from services.compute.model.mixers import DeltaNet, Lightning, Mamba, Mixer, ShortConv
from services.compute.model.spec import ModelSpec


class ParallelMixer:
    """Attention and a mixer with a state, which read the same rows and whose results are added."""

    def __init__(self, attention: AttentionLayer, mixer: StateLayer, factors: tuple[float, float]) -> None:
        """`factors`: of the results of attention and of the mixer."""
        self._attention, self._mixer = attention, mixer
        self._attention_factor, self._mixer_factor = factors

    def project(self, x: Tensor, step: Step) -> Tensor:
        """Write keys and values, and advance the state; return what `attend` needs, side by side."""
        return torch.cat((self._attention.project(x, step), self._mixer.project(x, step)), dim=-1)

    def attend(self, q: Tensor, step: Step) -> Tensor:
        """Return the sum of the results, [n_rows, hidden_size], to be summed over the ranks."""
        size = self._attention.query_size
        attended = self._attention.attend(q[:, :size].contiguous(), step) * self._attention_factor
        return attended + self._mixer.attend(q[:, size:].contiguous(), step) * self._mixer_factor


StateLayer = ShortConvLayer | Mamba2Layer | DeltaLayer | MambaLayer | LightningLayer


def load_mixer(spec: ModelSpec, mixer: Mixer, load: LinearLoader, index: int) -> StateLayer:
    """Load layer `index`'s mixer. Raises ModelError."""
    if isinstance(mixer, ShortConv):
        return load_short_conv(spec, mixer, load, index)
    if isinstance(mixer, DeltaNet):
        return load_delta(spec, mixer, load, index)
    if isinstance(mixer, Mamba):
        return load_mamba(spec, mixer, load, index)
    if isinstance(mixer, Lightning):
        return load_lightning(spec, mixer, load, index)
    return load_mamba2(spec, mixer, load, index)
