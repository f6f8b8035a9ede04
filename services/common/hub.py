"""Models of the Hugging Face hub: which files of a repository are served, and why a request to the hub failed.

huggingface_hub is imported when the hub is asked: the import takes a quarter of a second, and a service with a local
model needs none of it.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from services.common.gguf_files import choose, parts_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# Patterns of fnmatch. Unwanted are the same weights in other layouts: in folders, or for the publisher's own code.
# Pickle files match no pattern.
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
UNWANTED = ("*/*.safetensors", "consolidated*.safetensors", "onnx/*", "openvino/*", "original/*")
_AGAIN = (408, 429)  # the only 4xx statuses that are retried
_HOPELESS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a commit, with the hub's hash; empty if it has none."""

    name: str
    size: int  # bytes
    sha256: str  # for large files
    git_sha1: str  # for other files, by git hash-object


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one commit that are served."""

    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def list_files(api: HfApi, model: str, revision: str, choice: str) -> Listing:
    """Ask the hub for the served files of a revision: a branch, a tag or a commit.

    Raises ValueError for a repository that cannot be served, and the errors of huggingface_hub.
    """
    info = api.model_info(model, revision=revision, files_metadata=True)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    try:
        names = served_files(siblings, choice)
    except ValueError as error:
        raise ValueError(f"{model}@{revision}: {error}") from error
    if info.sha is None:
        raise ValueError(f"{model}: the hub names no commit for {revision}")
    files = []
    for name in names:
        sibling = siblings[name]
        sha256, git_sha1 = (sibling.lfs.sha256, "") if sibling.lfs else ("", sibling.blob_id or "")
        files.append(RemoteFile(name, (sibling.lfs.size if sibling.lfs else sibling.size) or 0, sha256, git_sha1))
    return Listing(info.sha, tuple(files))


def served_files(names: Collection[str], choice: str) -> list[str]:
    """The names of the files that are served: a folder with safetensors, or the parts of one GGUF model.

    `choice`: among several GGUF models, such as "Q4_K_M". Raises ValueError.
    """
    wanted = sorted(name for name in names if _matches(name, WANTED) and not _matches(name, UNWANTED))
    if choice or "config.json" not in wanted or not any(name.endswith(".safetensors") for name in wanted):
        first = choose(names, choice)
        if first is None:
            raise ValueError("no config.json with safetensors and no GGUF file to serve")
        wanted = [str(PurePosixPath(first).with_name(part)) for part in parts_of(PurePosixPath(first).name)]
        if absent := sorted({*wanted} - {*names}):
            raise ValueError(f"{absent[0]} is missing next to {first}")
    if outside := [name for name in wanted if ".." in PurePosixPath(name).parts or name.startswith("/")]:
        raise ValueError(f"the hub names a file outside of the model: {outside[0]}")
    return wanted


def why_hopeless(error: Exception, model: str, revision: str) -> str:
    """The message for an error of huggingface_hub that a retry cannot help; empty for others."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{model}: access must be asked for on its page, and HF_TOKEN be a token that has it"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model}: no revision {revision}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{model}: no such repository, or a private one that HF_TOKEN gives no access to"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{model}: not there yet, and HF_HUB_OFFLINE forbids to ask the hub"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        return f"{model}: {first_line(error)}" if 400 <= status < 500 and status not in _AGAIN else ""
    if isinstance(error, OSError) and error.errno in _HOPELESS:
        return f"{model}: {error}"
    return ""


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
