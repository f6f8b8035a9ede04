"""The linear layers of a decoder layer that share their inputs, and what makes these inputs. Free of torch."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from services.compute.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Unit:
    """Layers that share inputs; they get one scheme, because programs that serve them compute them together."""

    name: str  # the unit's name within its layer
    keys: tuple[str, ...]
    norm: str = ""  # key of the norm that makes the inputs
    maker: str = ""  # key of the linear layer whose outputs are, up to products with others, the inputs
    times: int = 1  # how often the maker's outputs repeat among the inputs, in blocks of `block`
    block: int = 1
    mixed: bool = False  # part of a mixture; programs that compute all experts together need one scheme for them


def units(spec: ModelSpec, index: int, stored: Container[str]) -> tuple[Unit, ...]:
    """Return the units of layer `index`, in the order of computation; `stored` holds the checkpoint's keys."""
    key = f"layers.{index}."
    attention, mlp = (name if name in stored else "" for name in (f"{key}attn_norm", f"{key}mlp_norm"))
    attending = (
        Unit("qkv", (f"{key}q", f"{key}k", f"{key}v"), norm=attention),
        Unit("o", (f"{key}o",), maker=f"{key}v", times=spec.n_heads // spec.n_kv_heads, block=spec.head_dim),
    )
    moe = spec.layers[index].moe
    if moe is not None:
        experts = [f"experts.{number}." for number in range(moe.n_experts)] + ["shared."] * bool(moe.shared_size)
        gated = spec.mlp == "gated"
        return attending + tuple(unit for name in experts for unit in _expert(name, key + name, gated=gated))
    inputs = (f"{key}gate", f"{key}up") if spec.mlp == "gated" else (f"{key}up",)
    return (
        *attending,
        Unit("up", inputs, norm=mlp),
        # Only a gate's product lets a factor of `up` through; an activation does not.
        Unit("down", (f"{key}down",), maker=f"{key}up" if spec.mlp == "gated" else ""),
    )


def _expert(name: str, key: str, *, gated: bool) -> tuple[Unit, Unit]:
    # The norm also makes the router's inputs, and the router stays as it is: factors cannot go through the norm.
    inputs = (f"{key}gate", f"{key}up") if gated else (f"{key}up",)
    maker = f"{key}up" if gated else ""
    return Unit(f"{name}up", inputs, mixed=True), Unit(f"{name}down", (f"{key}down",), maker=maker, mixed=True)
