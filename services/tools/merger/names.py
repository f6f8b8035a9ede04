"""The names of the tensors of an adapter's base."""

from __future__ import annotations

from collections.abc import Collection

from services.compute.model.families.fused import stacked_refs
from services.compute.model.families.naming import TEXT_PREFIXES, renamed
from services.compute.model.registry import Description

_EMBED, _HEAD = "embed", "head"
OWN_HEAD = "lm_head.weight"
_OUTER = "language_model."


class BaseNames:
    """The names of the base's tensors: those that its family has for them, and those that are stored."""

    def __init__(self, model: Description, stored: Collection[str]) -> None:
        self._refs, self._prefix = model.family.refs(model.spec), model.family.optional_prefix
        self._prefixes = model.family.prefixes or TEXT_PREFIXES
        as_computed = stacked_refs(model.spec, model.family.stacked)  # transformers 5 has other names for routers
        self._aliases = {ref.name: self._refs[key].name for key, ref in as_computed.items() if ref.place is None}
        head = self._refs.get(_HEAD)
        if head is not None and head != self._refs[_EMBED]:
            self._aliases[OWN_HEAD] = head.name
        self._stored = {self.named(name): name for name in stored}
        self._transposed = {ref.name for ref in self._refs.values() if ref.transposed}

    def named(self, name: str) -> str:
        """Return the family's name for one that a model of images and text, or transformers 5, has."""
        name = renamed(name, self._prefixes)
        return self._aliases.get(name, name)

    def place(self, name: str) -> str:
        """Return the stored name; "" if the base has no such tensor. Some are stored without their first part."""
        return next((self._stored[one] for one in self._spellings(name) if one in self._stored), "")

    def is_transposed(self, name: str) -> bool:
        """Whether a matrix is stored [in, out]."""
        return any(one in self._transposed for one in self._spellings(name))

    def within(self, module: str) -> list[str]:
        """Return the family's names of the tensors of the modules whose names end with `module`, after a dot."""
        return [name for name in self._stored if f".{module}." in f".{name}."]

    def head(self) -> tuple[str, str]:
        """Return the stored names of the embedding and of the head that is tied to it; "" for one that is not."""
        embedding = self.place(self._refs[_EMBED].name)
        tied = self._refs[_HEAD] == self._refs[_EMBED] and not self.place(OWN_HEAD)
        outer = _OUTER if embedding.startswith(_OUTER) else ""
        return embedding, f"{outer}{OWN_HEAD}" if tied else ""

    def _spellings(self, name: str) -> tuple[str, ...]:
        return name, name.removeprefix(self._prefix), self._prefix + name
