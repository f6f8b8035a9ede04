"""Common part of the formats of compressed-tensors: one group of layers, whose weights share blocks of scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.compute.model.families.config import Config
from services.compute.model.layout import SCALES, Grid

# Tensors about activations, and about shapes that packed tensors do not show.
MIXED = "mixed-precision"  # `format` of a configuration whose groups have formats of their own
UNREAD = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "weight_shape")
_PASSED = ("ignore", "kv_cache_scheme", "quantization_status", "global_compression_ratio", "version")


@dataclass(frozen=True, slots=True)
class Weights:
    """The quantization of a group's weights."""

    bits: int
    block: tuple[int, int]
    symmetric: bool
    reordered: bool  # inputs are grouped in a stored order

    @property
    def scales(self) -> Grid:
        """A scale for each block."""
        return Grid(("weight_scale",), SCALES, self.block)


def read_weights(config: Config, kind: str) -> Weights:
    """Read a configuration whose weights are of `kind` ("int", "float"). Raises ModelError."""
    # The stored tensors show which modules are quantized; activations and the KV cache stay in the served dtype.
    config.pass_over(*_PASSED)
    for key in ("sparsity_config", "transform_config"):
        value: Any = config.raw(key)
        if value and value not in ({"format": "dense"}, {"config_groups": {}}):
            raise config.error(key, f"{value!r} is not implemented; allowed: null")
    groups = config.section("config_groups")
    names = list(config.raw("config_groups"))
    if len(names) != 1:
        raise config.error("config_groups", f"{len(names)} groups; one is implemented")
    group = groups.section(names[0])
    group.require("format", config.raw("format"))
    group.pass_over("targets", "input_activations", "output_activations")
    return _weights(group.section("weights"), kind)


def split_groups(config: Config) -> list[Config]:
    """Return the configuration of each group of one in :data:`MIXED`, in the group's format. Raises ModelError."""
    groups = config.section("config_groups")
    config.pass_over(*_PASSED, "sparsity_config", "transform_config")  # each group's configuration repeats them
    by_name = {name: groups.raw(name) for name in config.raw("config_groups")}
    if not by_name or not all(isinstance(group, dict) for group in by_name.values()):
        raise config.error("config_groups", f"expected groups of layers, found {by_name!r}")
    if bare := [name for name, group in by_name.items() if not group.get("format")]:
        raise config.error("config_groups", f"{', '.join(bare)} must have a format of its own in {MIXED}")
    alone = [config.but(format=group.get("format"), config_groups={name: group}) for name, group in by_name.items()]
    for made in alone:
        made.pass_over("quant_method")
    return alone


def _weights(weights: Config, kind: str) -> Weights:
    weights.require("type", kind)
    weights.require("dynamic", False)
    weights.require("zp_dtype", "torch.int8")
    weights.require("actorder", False, True, "group", "weight", "static")
    weights.pass_over("observer", "observer_kwargs", "scale_dtype")
    return Weights(
        weights.integer("num_bits", 8),
        _block(weights),
        weights.flag("symmetric", True),
        weights.raw("actorder") in (True, "group"),
    )


def _block(weights: Config) -> tuple[int, int]:
    size, structure = weights.raw("group_size"), weights.raw("block_structure")
    strategy = weights.raw("strategy") or ("group" if size else "tensor")
    if strategy in ("tensor", "channel"):
        return (1, 0) if strategy == "channel" else (0, 0)
    if strategy == "group":
        return 1, weights.integer("group_size")
    if strategy == "block":
        block = structure
        if isinstance(structure, str):
            block = [int(part) for part in structure.split("x") if part.isdecimal()]
        if isinstance(block, list) and len(block) == 2 and all(type(part) is int and part > 0 for part in block):
            return block[0], block[1]
        raise weights.error("block_structure", f"expected two sizes, found {structure!r}")
    raise weights.error("strategy", f"{strategy!r} is not implemented; allowed: 'tensor', 'channel', 'group', 'block'")
