"""Finds the format of quantized weights named by a config.json; every file of `quantized/` is one. Free of torch."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from services.compute.model.families.config import Config
from services.compute.model.formats import quantized
from services.compute.model.formats.base import Format
from services.compute.model.formats.compressed_tensors import MIXED, split_groups
from services.compute.model.layout import Layout

_KEYS = ("quantization_config", "compression_config")  # older checkpoints use the second key


def _found(name: str) -> Format:
    quantized_format: Format = import_module(f"{quantized.__name__}.{name}").FORMAT
    return quantized_format


FORMATS = tuple(_found(module.name) for module in iter_modules(quantized.__path__))


def read_layouts(config: Config) -> tuple[Layout, ...]:
    """Return the layouts of a checkpoint's quantized linear layers; () if there are none. Raises ModelError.

    A module has the first layout whose codes are stored under its name.
    """
    key = config.first_of(*_KEYS)
    if not config.raw(key):  # null, false or {}
        return ()
    values = config.section(key)
    named = _named(values, "quant_method", {known.quant_method: known for known in FORMATS})
    variants = {name: known for known in FORMATS if known.quant_method == named.quant_method for name in known.variants}
    if variants and values.raw("format") == MIXED:
        return _mixed(values, variants)
    return ((_named(values, "format", variants) if variants else named).read(values),)


def _mixed(values: Config, variants: dict[str, Format]) -> tuple[Layout, ...]:
    """Return the layout of each group of layers; names and dtypes of codes distinguish groups."""
    layouts = [_named(group, "format", variants).read(group) for group in split_groups(values)]
    codes = [(suffix, dtype) for layout in layouts for suffix in layout.codes.suffixes for dtype in layout.codes.dtypes]
    if len(set(codes)) < len(codes):
        raise values.error("config_groups", "several groups with one format are not implemented; allowed: one of each")
    return tuple(layouts)


def _named(values: Config, key: str, known: dict[str, Format]) -> Format:
    name = values.raw(key)
    if not isinstance(name, str) or name not in known:
        raise values.error(key, f"{name!r} is not implemented; known: {', '.join(sorted(known))}")
    return known[name]
