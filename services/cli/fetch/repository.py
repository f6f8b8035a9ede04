"""The model that `ryzanstein fetch` downloads: its repository, revision and choice of file."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.cli.errors import CommandError

_MODEL = re.compile(
    r"^(?:hf://)?(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(?::(?P<choice>\w[\w.-]*))?(?:@(?P<revision>[\w./-]+))?$"
)


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A model of the hub, and the wanted revision: a branch, a tag or a commit."""

    model: str  # owner/name
    revision: str
    choice: str = ""  # among several GGUF models, such as "Q4_K_M"; "": safetensors, or the only GGUF model

    @classmethod
    def parse(cls, text: str, revision: str = "") -> ModelReference:
        """Parse ``owner/name`` or ``hf://owner/name``, each with or without ``:choice`` and ``@revision``.

        Raises CommandError.
        """
        match = _MODEL.match(text)
        if match is None or (revision and match["revision"] and match["revision"] != revision):
            raise CommandError(f"{text}: not a model of the hub like owner/name or hf://owner/name:Q4_K_M@revision")
        return cls(match["id"], match["revision"] or revision or "main", match["choice"] or "")

    @property
    def place(self) -> str:
        """Return the part of file names that all revisions share."""
        return "--".join(filter(None, (self.model.replace("/", "--"), self.choice)))

    @property
    def name(self) -> str:
        """The default folder name, which needs no request to the hub."""
        return self.place if self.revision == "main" else f"{self.place}@{self.revision.replace('/', '--')}"
