"""LoRA adapters that were loaded while the installation runs, as Redis keeps them: a hash of names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

MAX_NAME = 256  # characters of an adapter's name
MAX_PATH = 4096  # characters of a folder's


def is_name(name: str) -> bool:
    """Whether a route or an adapter may have the name: a line of a log or of a terminal shows no other one."""
    return 0 < len(name) <= MAX_NAME and name.isprintable() and name == name.strip()


def check_name(name: str) -> None:
    """Raise ValueError for a text that :func:`is_name` refuses."""
    if not is_name(name):
        raise ValueError(
            f"expected 1 to {MAX_NAME} printable characters, no control or format characters, no space at an end, "
            f"found {name[:60]!a}"
        )


def check_path(path: str) -> None:
    """Raise ValueError for a path that no folder of an adapter has."""
    if not 0 < len(path) <= MAX_PATH or not path.isprintable():
        raise ValueError(
            f"expected 1 to {MAX_PATH} printable characters, no control or format characters, found {path[:60]!a}"
        )


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """An adapter under the name that clients use."""

    name: str
    base: str  # name of its model
    digest: str  # digest of its files: an adapter loaded again under its name is another one
    source: str  # a folder that workers can read
    pinned: bool = False  # every worker loads it before it is asked for, and keeps it in a slot

    def to_json(self) -> str:
        """The value stored in Redis, without the name."""
        return json.dumps({key: value for key, value in asdict(self).items() if key != "name"})

    @staticmethod
    def from_json(name: str, text: str | bytes) -> RegisteredAdapter:
        """Read a stored value, without fields of later versions; raises ValueError when it is not an adapter."""
        try:
            stored = json.loads(text)
            known = (field.name for field in fields(RegisteredAdapter))
            return RegisteredAdapter(name, **{field: stored[field] for field in known if field in stored})
        except TypeError as error:
            raise ValueError(f"not an adapter: {error}") from error


def read_registered(entries: Mapping[str | bytes, str | bytes]) -> dict[str, RegisteredAdapter]:
    """The adapters of the hash, by name. Raises ValueError."""
    texts = {name if isinstance(name, str) else name.decode(): text for name, text in entries.items()}
    return {name: RegisteredAdapter.from_json(name, text) for name, text in texts.items()}
