"""Finds a model: a local folder or GGUF file, or a repository of the Hugging Face hub, which is downloaded.

A folder or repository of several GGUF models needs a choice, as in `owner/name:Q4_K_M`.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.gguf_files import find_model, local_path, split_choice
from services.common.hub import first_line, list_files, why_hopeless
from services.compute.model.spec import ModelError

_WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class Download:
    """The files of a model to download, and their folder."""

    model: str
    blobs: Path
    sizes: Mapping[str, int]  # bytes of each file, by its name among the blobs

    def __str__(self) -> str:
        return f"downloading {self.done:,} of {self.total:,} bytes of {self.model}"

    @property
    def done(self) -> int:
        """Bytes that are there."""
        return sum(min(size, self._there(name)) for name, size in self.sizes.items())

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    def _there(self, name: str) -> int:
        """Bytes present of a file. Incomplete files have a suffix; a killed process may have left another one."""
        n_bytes = 0
        for path in self.blobs.glob(f"{name}*"):
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                n_bytes = max(n_bytes, path.stat().st_size)
        return n_bytes


def resolve_model(model: str, revision: str = "", begins: Callable[[Download], None] = lambda _: None) -> Path:
    """Return the local folder or GGUF file of `model`, a path or a hub id such as "org/name". Raises ModelError.

    Calls `begins` with the files to download before the download, if the hub answers.
    """
    if (local := local_model(model)) is not None:
        return local
    repository, choice = split_choice(model)
    return _within(snapshot(repository, choice, revision, begins), choice)


def local_model(model: str) -> Path | None:
    """The folder or GGUF file `model`; None if `model` is a hub id. Raises ModelError for a path of another kind."""
    try:
        local = local_path(model)
    except ValueError as error:
        raise ModelError(str(error)) from error
    if local is None or local.is_file():
        return local and local.absolute()  # a link keeps its name, which says what it is part of
    return _within(local.resolve(), split_choice(model)[1])


def _within(folder: Path, choice: str) -> Path:
    """Return the GGUF file in `folder` that is asked for, or the folder if it holds safetensors. Raises ModelError."""
    if not choice and (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder
    try:
        return find_model(folder, choice) or folder
    except ValueError as error:
        raise ModelError(f"{folder}: {error}") from error


def snapshot(
    model: str,
    choice: str = "",
    revision: str = "",
    begins: Callable[[Download], None] = lambda _: None,
    *,
    weights: bool = True,
) -> Path:
    """Return the folder of a repository's served files, without `weights` of the small ones. Raises ModelError.

    If the hub does not answer, the local cache has to suffice.
    """
    from huggingface_hub import HfApi, constants, errors, snapshot_download
    from huggingface_hub.file_download import repo_folder_name

    http_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # the installed HTTP library's
    revision = revision or constants.DEFAULT_REVISION
    try:
        listing = list_files(HfApi(), model, revision, choice)
    except ValueError as error:
        raise ModelError(str(error)) from error
    except (http_error, OSError) as error:
        return _cached(model, revision, error)
    files = [file for file in listing.files if weights or not file.name.endswith(_WEIGHTS)]
    if not files:
        raise ModelError(f"{model}: its GGUF file has to be fetched before it is checked: ryzanstein fetch")
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=model, repo_type="model"), "blobs")
    begins(Download(model, folder, {file.sha256 or file.git_sha1: file.size for file in files}))
    patterns = [glob.escape(file.name) for file in files]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (http_error, OSError) as error:
        raise ModelError(why_hopeless(error, model, revision) or f"{model}: {error}") from error


def _cached(model: str, revision: str, error: Exception) -> Path:
    """Return the folder of a repository in the local cache. Raises ModelError, with the hub's `error` if it is one."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except errors.LocalEntryNotFoundError:
        if isinstance(error, errors.HfHubHTTPError):
            raise ModelError(why_hopeless(error, model, revision) or f"{model}: {first_line(error)}") from error
        raise ModelError(f"{model}: not in the local cache, and the hub is not asked or not reached") from error
