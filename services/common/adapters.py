"""LoRA adapters that were loaded while the installation runs, as Redis keeps them: a hash of names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """An adapter under the name that clients use."""

    name: str
    base: str  # name of its model
    digest: str  # of its files: an adapter loaded again under its name is another one
    source: str  # a folder that workers can read
    pinned: bool = False  # every worker loads it before it is asked for, and keeps it in a slot

    def to_json(self) -> str:
        """The value stored in Redis, without the name."""
        return json.dumps({key: value for key, value in asdict(self).items() if key != "name"})

    @staticmethod
    def from_json(name: str, text: str | bytes) -> RegisteredAdapter:
        """Read a stored value; raises ValueError when it is not an adapter."""
        try:
            return RegisteredAdapter(name, **json.loads(text))
        except TypeError as error:
            raise ValueError(f"not an adapter: {error}") from error


def read_registered(found: Mapping[str | bytes, str | bytes]) -> dict[str, RegisteredAdapter]:
    """The adapters of the hash, by name. Raises ValueError."""
    texts = {name if isinstance(name, str) else name.decode(): text for name, text in found.items()}
    return {name: RegisteredAdapter.from_json(name, text) for name, text in texts.items()}
