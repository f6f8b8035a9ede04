"""Finds the quantization method that a config.json names: every file of `methods/` is one. Free of torch."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from services.worker.model.families.config import Config
from services.worker.model.quantization import methods
from services.worker.model.quantization.layout import Layout
from services.worker.model.quantization.method import Method

_KEYS = ("quantization_config", "compression_config")  # the second one in older checkpoints


def _found(name: str) -> Method:
    method: Method = import_module(f"{methods.__name__}.{name}").METHOD
    return method


METHODS = tuple(_found(module.name) for module in iter_modules(methods.__path__))


def read_layout(config: Config) -> Layout | None:
    """Return how the linear layers of a checkpoint are stored, None where as they are. Raises ModelError."""
    key = config.first_of(*_KEYS)
    if not config.raw(key):  # null, false or {}
        return None
    values = config.section(key)
    named = _named(values, "quant_method", {method.quant_method: method for method in METHODS})
    formats = {name: other for other in METHODS if other.quant_method == named.quant_method for name in other.formats}
    return (_named(values, "format", formats) if formats else named).read(values)


def _named(values: Config, key: str, known: dict[str, Method]) -> Method:
    name = values.raw(key)
    if not isinstance(name, str) or name not in known:
        raise values.error(key, f"{name!r} is not implemented; known: {', '.join(sorted(known))}")
    return known[name]
