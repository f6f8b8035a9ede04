"""Layers that keep a state outside the KV cache, by their sizes. Free of torch.

A layer has a state of one size however long its sequence is, and each token changes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from services.compute.backends.names import Gate
from services.compute.backends.shapes import StatePart

Divided = tuple[tuple[str, int], ...]  # parts that ranks divide among themselves, and their numbers
Products = tuple[tuple[int, int], ...]  # the inputs and outputs of a rank's linear layers


def _elements(products: Products) -> int:
    return sum(n_in * n_out for n_in, n_out in products)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A convolution over the last tokens between two gates: out(c * conv(b * x)) (LFM2, arXiv:2511.23404)."""

    size: int  # channels
    kernel: int  # tokens that a row sees, including its own
    bias: bool

    @property
    def divided(self) -> Divided:
        """The parts that ranks divide."""
        return (("channels of the convolution", self.size),)

    def parts(self, ranks: int) -> tuple[StatePart, ...]:
        """Return a rank's state of one sequence: its inputs of the last tokens."""
        return (StatePart((self.kernel - 1, self.size // ranks)),)

    def products(self, hidden: int, ranks: int) -> Products:
        """Return a rank's linear layers."""
        size = self.size // ranks
        return *[(hidden, size)] * 3, (size, hidden)

    def elements(self, hidden: int, ranks: int) -> int:
        """Return the elements of a rank's matrices."""
        return _elements(self.products(hidden, ranks)) + self.kernel * self.size // ranks

    def columns(self, ranks: int) -> int:
        """Return the numbers of a row that a rank computes at a time."""
        return 4 * self.size // ranks


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A state-space layer whose heads decay by one number each (Mamba 2, arXiv:2405.21060)."""

    n_heads: int
    head_dim: int  # numbers of a head's input
    n_groups: int  # heads of a group share b and c
    n_states: int  # numbers of the state for each number of a head
    kernel: int  # tokens that a row of the convolution sees, including its own
    conv_bias: bool
    bias: bool  # the products before and after have one
    least_step: float = 0.0  # least step of time
    gate: Gate = "inside"
    factors: tuple[float, ...] = ()  # those of z, x, b, c and dt; (): none

    @property
    def size(self) -> int:
        """Numbers of all heads' inputs."""
        return self.n_heads * self.head_dim

    @property
    def divided(self) -> Divided:
        """The parts that ranks divide; a single group is held by all of them."""
        heads = (("state-space heads", self.n_heads),)
        return heads if self.n_groups == 1 else (*heads, ("state-space groups", self.n_groups))

    def groups(self, ranks: int) -> int:
        """Return the number of groups on each rank."""
        return max(1, self.n_groups // ranks)

    def channels(self, ranks: int) -> int:
        """Return a rank's channels of the convolution: the heads' inputs, b and c."""
        return self.size // ranks + 2 * self.groups(ranks) * self.n_states

    def parts(self, ranks: int) -> tuple[StatePart, ...]:
        """Return a rank's state of one sequence: the convolution's last inputs, and the heads' states."""
        heads = (self.n_heads // ranks, self.head_dim, self.n_states)
        return StatePart((self.kernel - 1, self.channels(ranks))), StatePart(heads, exact=True)

    def products(self, hidden: int, ranks: int) -> Products:
        """Return a rank's linear layers: z, x, b, c, dt and what follows the scan."""
        size, states = self.size // ranks, self.groups(ranks) * self.n_states
        outputs = (size, size, states, states, self.n_heads // ranks)
        return *((hidden, n_out) for n_out in outputs), (size, hidden)

    def elements(self, hidden: int, ranks: int) -> int:
        """Return the elements of a rank's matrices."""
        return _elements(self.products(hidden, ranks)) + self.kernel * self.channels(ranks)

    def columns(self, ranks: int) -> int:
        """Return the numbers of a row that a rank computes at a time, in float32 for the most part."""
        return 4 * (self.size // ranks + self.channels(ranks))


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Linear attention that corrects what its state remembers of a key (gated delta rule, arXiv:2412.06464).

    With a `rank` each number of a head's keys has a decay of its own (Kimi's delta attention, arXiv:2510.26692).
    """

    n_key_heads: int
    n_value_heads: int  # heads of a key head share its keys and queries
    key_dim: int
    value_dim: int
    kernel: int  # tokens that a row of the convolution sees, including its own
    rank: int = 0  # numbers that a row's decays and its gate are products of; 0: they are products of the row

    @property
    def keys(self) -> int:
        """Numbers of all heads' keys."""
        return self.n_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all heads' values."""
        return self.n_value_heads * self.value_dim

    @property
    def divided(self) -> Divided:
        """The parts that ranks divide."""
        return (("key heads of the delta rule", self.n_key_heads),)

    def parts(self, ranks: int) -> tuple[StatePart, ...]:
        """Return a rank's state of one sequence: the convolution's last inputs, and the heads' states."""
        inputs = (self.kernel - 1, (2 * self.keys + self.values) // ranks)
        return StatePart(inputs), StatePart((self.n_value_heads // ranks, self.value_dim, self.key_dim), exact=True)

    def products(self, hidden: int, ranks: int) -> Products:
        """Return a rank's linear layers: q, k, v, rates, the gate, the decays and what follows the scan."""
        keys, values, heads = (n // ranks for n in (self.keys, self.values, self.n_value_heads))
        products = *((hidden, n_out) for n_out in (keys, keys, values, heads)), (values, hidden)
        if not self.rank:
            return *products, (hidden, values), (hidden, heads)
        return *products, *[(hidden, self.rank)] * 2, (self.rank, values), (self.rank, keys)

    def elements(self, hidden: int, ranks: int) -> int:
        """Return the elements of a rank's matrices."""
        return _elements(self.products(hidden, ranks)) + self.kernel * (2 * self.keys + self.values) // ranks

    def columns(self, ranks: int) -> int:
        """Return the numbers of a row that a rank computes at a time, in float32 for the most part."""
        return 6 * (self.keys + self.values) // ranks


@dataclass(frozen=True, slots=True)
class Mamba:
    """A state-space layer whose channels have a decay for each number of their states (Mamba, arXiv:2312.00752)."""

    size: int  # channels
    n_states: int  # numbers of a channel's state
    step_rank: int  # numbers that a row's steps of time are products of
    kernel: int  # tokens that a row of the convolution sees, including its own
    conv_bias: bool
    bias: bool  # the products before and after have one
    norms: Literal["none", "unit", "weighted"] = "none"  # RMS norms of b, c and the numbers of the steps
    norm_eps: float = 1e-6  # the epsilon of these norms

    @property
    def divided(self) -> Divided:
        """The parts that ranks divide."""
        return (("state-space channels", self.size),)

    def parts(self, ranks: int) -> tuple[StatePart, ...]:
        """Return a rank's state of one sequence: the convolution's last inputs, and the channels' states."""
        size = self.size // ranks
        return StatePart((self.kernel - 1, size)), StatePart((size, self.n_states), exact=True)

    def products(self, hidden: int, ranks: int) -> Products:
        """Return a rank's linear layers: x, z, those of the steps, b and c, and what follows the scan."""
        size, chosen = self.size // ranks, self.step_rank + 2 * self.n_states
        return (hidden, size), (hidden, size), (size, chosen), (self.step_rank, size), (size, hidden)

    def elements(self, hidden: int, ranks: int) -> int:
        """Return the elements of a rank's matrices."""
        return _elements(self.products(hidden, ranks)) + (self.kernel + self.n_states) * self.size // ranks

    def columns(self, ranks: int) -> int:
        """Return the numbers of a row that a rank computes at a time, in float32 for the most part."""
        return 10 * self.size // ranks


@dataclass(frozen=True, slots=True)
class Lightning:
    """Linear attention whose heads forget by a constant factor each (lightning attention, arXiv:2501.08313)."""

    n_heads: int
    head_dim: int
    slope: float  # the layer's factor of the logarithms of decays

    @property
    def size(self) -> int:
        """Numbers of all heads' queries, keys or values."""
        return self.n_heads * self.head_dim

    @property
    def decays(self) -> tuple[float, ...]:
        """The factor of each head's state at every token."""
        return tuple(math.exp(-self.slope * 2 ** (-8 * (head + 1) / self.n_heads)) for head in range(self.n_heads))

    @property
    def divided(self) -> Divided:
        """The parts that ranks divide."""
        return (("heads of lightning attention", self.n_heads),)

    def parts(self, ranks: int) -> tuple[StatePart, ...]:
        """Return a rank's state of one sequence: that of the heads."""
        return (StatePart((self.n_heads // ranks, self.head_dim, self.head_dim), exact=True),)

    def products(self, hidden: int, ranks: int) -> Products:
        """Return a rank's linear layers: q, k, v, the gate and what follows the scan."""
        size = self.size // ranks
        return *[(hidden, size)] * 4, (size, hidden)

    def elements(self, hidden: int, ranks: int) -> int:
        """Return the elements of a rank's matrices."""
        return _elements(self.products(hidden, ranks))

    def columns(self, ranks: int) -> int:
        """Return the numbers of a row that a rank computes at a time, in float32 for the most part."""
        return 14 * self.size // ranks


Mixer = ShortConv | Mamba2 | DeltaNet | Mamba | Lightning
