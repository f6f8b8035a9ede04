"""Asks the hub for a model: the commit of a revision, and the files that serving needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from services.cli.errors import CommandError
from services.common.checkpoint_files import UNWANTED, WANTED
from services.common.gguf_files import choose, parts_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

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
        found = _MODEL.match(text)
        if found is None or (revision and found["revision"] and found["revision"] != revision):
            raise CommandError(f"{text}: not a model of the hub like owner/name or hf://owner/name:Q4_K_M@revision")
        return cls(found["id"], found["revision"] or revision or "main", found["choice"] or "")

    @property
    def place(self) -> str:
        """Return the part of file names that all revisions share."""
        return "--".join(filter(None, (self.model.replace("/", "--"), self.choice)))

    @property
    def name(self) -> str:
        """The default folder name, which needs no request to the hub."""
        return self.place if self.revision == "main" else f"{self.place}@{self.revision.replace('/', '--')}"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a commit, with the hub's hash; empty if it has none."""

    name: str
    size: int
    sha256: str  # for large files
    git_sha1: str  # for other files, by git hash-object


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one commit that serving needs."""

    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def list_files(api: HfApi, reference: ModelReference) -> Listing:
    """Ask the hub. Raises CommandError for a repository that cannot be served, and errors of huggingface_hub."""
    info = api.model_info(reference.model, revision=reference.revision, files_metadata=True)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    files = []
    for name in _served(reference, siblings):
        if ".." in PurePosixPath(name).parts or name.startswith("/"):
            raise CommandError(f"{reference.model}: the hub names a file outside of the model: {name}")
        sibling = siblings[name]
        sha256 = sibling.lfs.sha256 if sibling.lfs else ""
        size = sibling.lfs.size if sibling.lfs else sibling.size
        files.append(RemoteFile(name, size or 0, sha256, "" if sibling.lfs else sibling.blob_id or ""))
    if info.sha is None:
        raise CommandError(f"{reference.model}: the hub names no commit for {reference.revision}")
    return Listing(info.sha, tuple(files))


def _served(reference: ModelReference, names: Iterable[str]) -> list[str]:
    """The names of the files that are served: a folder with safetensors, or the parts of one GGUF model."""
    wanted = sorted(name for name in names if _matches(name, WANTED) and not _matches(name, UNWANTED))
    if not reference.choice and "config.json" in wanted and any(name.endswith(".safetensors") for name in wanted):
        return wanted
    try:
        first = choose(names, reference.choice)
    except ValueError as error:
        raise CommandError(f"{reference.model}@{reference.revision}: {error}") from error
    if first is None:
        missing = "no config.json with safetensors and no GGUF file to serve"
        raise CommandError(f"{reference.model}@{reference.revision}: {missing}")
    parts = [str(PurePosixPath(first).with_name(part)) for part in parts_of(PurePosixPath(first).name)]
    if absent := sorted({*parts} - {*names}):
        raise CommandError(f"{reference.model}@{reference.revision}: {absent[0]} is missing beside {first}")
    return parts


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
