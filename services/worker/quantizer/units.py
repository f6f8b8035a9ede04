"""The linear layers of a decoder layer that share their inputs, and what makes these inputs. Free of torch."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from services.worker.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Unit:
    """Layers that share inputs; they get one scheme, because programs that serve them compute them together."""

    name: str  # of the unit in its layer
    keys: tuple[str, ...]
    norm: str = ""  # key of the norm that makes the inputs
    maker: str = ""  # key of the linear layer whose outputs are, up to products with others, the inputs
    times: int = 1  # how often the maker's outputs repeat among the inputs, in blocks of `block`
    block: int = 1


def units(spec: ModelSpec, index: int, stored: Container[str]) -> tuple[Unit, ...]:
    """Return the units of layer `index`, in the order of computation; `stored` holds the checkpoint's keys."""
    key = f"layers.{index}."
    attention, mlp = (name if name in stored else "" for name in (f"{key}attn_norm", f"{key}mlp_norm"))
    inputs = (f"{key}gate", f"{key}up") if spec.mlp == "gated" else (f"{key}up",)
    return (
        Unit("qkv", (f"{key}q", f"{key}k", f"{key}v"), norm=attention),
        Unit("o", (f"{key}o",), maker=f"{key}v", times=spec.n_heads // spec.n_kv_heads, block=spec.head_dim),
        Unit("up", inputs, norm=mlp),
        # Only a gate's product lets a factor of `up` through; an activation does not.
        Unit("down", (f"{key}down",), maker=f"{key}up" if spec.mlp == "gated" else ""),
    )
