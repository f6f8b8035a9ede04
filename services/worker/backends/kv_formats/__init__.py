"""The formats of the KV cache, a file each; their names are known without torch."""

from __future__ import annotations

from pkgutil import iter_modules

NAMES = tuple(sorted(module.name for module in iter_modules(__path__)))
