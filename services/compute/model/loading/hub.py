"""Finds a model: a local folder or GGUF file, or a repository of the Hugging Face hub, which is downloaded.

A folder or repository of several GGUF models needs a choice, as in `owner/name:Q4_K_M`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.checkpoint_files import UNWANTED, WANTED
from services.common.gguf_files import choose, find_model, local_path, parts_of, split_choice
from services.compute.model.spec import ModelError


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Settings of the hub; None leaves a choice to huggingface_hub and its environment variables."""

    revision: str | None = None  # branch, tag or commit
    token: str | None = None
    cache_dir: Path | None = None
    offline: bool = False


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository."""

    blob: str  # its name in the cache
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Download:
    """The files of a model to download, and their folder."""

    model: str
    blobs: Path
    sizes: Mapping[str, int]  # bytes of each file, by its name among the blobs

    def __str__(self) -> str:
        there = sum(min(size, self._there(name)) for name, size in self.sizes.items())
        return f"downloading {there:,} of {sum(self.sizes.values()):,} bytes of {self.model}"

    def _there(self, name: str) -> int:
        """Bytes present of a file. Incomplete files have a suffix; a killed process may have left another one."""
        found = 0
        for path in self.blobs.glob(f"{name}*"):
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                found = max(found, path.stat().st_size)
        return found


def resolve_model(
    model: str, settings: HubSettings = HubSettings(), begins: Callable[[Download], None] = lambda _: None
) -> Path:
    """Return the local folder or GGUF file of `model`, a path or a hub id such as "org/name". Raises ModelError.

    Calls `begins` with the files to download before the download, if the hub is reachable.
    """
    if (local := local_model(model)) is not None:
        return local
    repository, choice = split_choice(model)
    return _within(_download(repository, choice, settings, begins), choice)


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


def _download(model: str, choice: str, settings: HubSettings, begins: Callable[[Download], None]) -> Path:
    from huggingface_hub import constants

    wanted = [*WANTED]
    files = None if settings.offline or constants.HF_HUB_OFFLINE else _listing(model, settings)
    if files is not None:
        wanted = _wanted(model, choice, files)
        begins(_announced(model, wanted, files, settings))
    elif choice:
        settings = replace(settings, offline=True)
    return snapshot(model, wanted, UNWANTED, settings)


def snapshot(model: str, wanted: Sequence[str], unwanted: Sequence[str], settings: HubSettings) -> Path:
    """Return the folder of a repository's files by patterns, from the hub or the local cache. Raises ModelError."""
    # Imported here, because the import takes a quarter of a second, which a local folder does not need.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = snapshot_download(
            model,
            revision=settings.revision,
            token=settings.token,
            cache_dir=settings.cache_dir,
            local_files_only=settings.offline,
            allow_patterns=[*wanted],
            ignore_patterns=[*unwanted],
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelError(f"{model}: not in the local cache, and the hub is not asked or not reached") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(f"{model}: {error}") from error
    return Path(folder)


def _wanted(model: str, choice: str, files: Mapping[str, HubFile]) -> list[str]:
    """Return patterns of the files to download: those of the chosen GGUF model, or of a checkpoint folder."""
    if not choice and any(name.endswith(".safetensors") for name in files):
        return [*WANTED]
    try:
        first = choose(files, choice)
    except ValueError as error:
        raise ModelError(f"{model}: {error}") from error
    if first is None:
        return [*WANTED]
    folder, _, name = first.rpartition("/")
    return [f"{folder}/{part}" if folder else part for part in parts_of(name)]


def _announced(model: str, wanted: list[str], files: Mapping[str, HubFile], settings: HubSettings) -> Download:
    """Return the download of the `wanted` files."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    names = filter_repo_objects(files, allow_patterns=wanted, ignore_patterns=list(UNWANTED))
    sizes = {files[name].blob: files[name].size for name in names}
    cache = Path(settings.cache_dir or constants.HF_HUB_CACHE)
    return Download(model, cache / repo_folder_name(repo_id=model, repo_type="model") / "blobs", sizes)


def _listing(model: str, settings: HubSettings) -> dict[str, HubFile] | None:
    """The files of a repository; None if the hub does not answer, in which case the cache may suffice."""
    from huggingface_hub import HfApi, constants, errors

    http_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # the installed HTTP library's
    try:
        revision = settings.revision or constants.DEFAULT_REVISION
        info = HfApi(token=settings.token).model_info(model, revision=revision, files_metadata=True)
    except (http_error, errors.HfHubHTTPError, errors.HFValidationError, OSError):  # the download reports it as well
        return None
    return {
        file.rfilename: HubFile((file.lfs.sha256 if file.lfs else file.blob_id) or "", file.size or 0)
        for file in info.siblings or []
    }
