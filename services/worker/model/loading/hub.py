"""Finds a model: a local folder, or a repository of the Hugging Face hub, which is downloaded into the hub's cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.checkpoint_files import UNWANTED, WANTED
from services.worker.model.spec import ModelError


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Settings of the hub; None leaves a choice to huggingface_hub and its environment variables."""

    revision: str | None = None  # branch, tag or commit
    token: str | None = None
    cache_dir: Path | None = None
    offline: bool = False


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
    """Return the local folder of `model`, a path or a hub id such as "org/name". Raises ModelError.

    Calls `begins` with the files to download before the download, if the hub is reachable.
    """
    return local_folder(model) or _download(model, settings, begins)


def local_folder(model: str) -> Path | None:
    """The folder `model`; None if `model` is a hub id. Raises ModelError for a path that is no folder."""
    local = Path(model).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(f"{model}: no such folder")
    return None


def _download(model: str, settings: HubSettings, begins: Callable[[Download], None]) -> Path:
    # Imported here, because the import takes a quarter of a second, which a local folder does not need.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        if not (settings.offline or constants.HF_HUB_OFFLINE) and (download := _listing(model, settings)):
            begins(download)
        folder = snapshot_download(
            model,
            revision=settings.revision,
            token=settings.token,
            cache_dir=settings.cache_dir,
            local_files_only=settings.offline,
            allow_patterns=list(WANTED),
            ignore_patterns=list(UNWANTED),
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelError(f"{model}: not in the local cache, and the hub is not asked or not reached") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(f"{model}: {error}") from error
    return Path(folder)


def _listing(model: str, settings: HubSettings) -> Download | None:
    """The files to download; None if the hub does not answer, in which case the cache may suffice."""
    from huggingface_hub import HfApi, constants, errors
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    http_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # of the installed HTTP library
    try:
        revision = settings.revision or constants.DEFAULT_REVISION
        info = HfApi(token=settings.token).model_info(model, revision=revision, files_metadata=True)
    except (http_error, errors.HfHubHTTPError, OSError):  # the download itself asks the hub again
        return None
    files = filter_repo_objects(
        info.siblings or [],
        allow_patterns=list(WANTED),
        ignore_patterns=list(UNWANTED),
        key=lambda file: file.rfilename,
    )
    sizes = {(file.lfs.sha256 if file.lfs else file.blob_id) or "": file.size or 0 for file in files}
    cache = Path(settings.cache_dir or constants.HF_HUB_CACHE)
    return Download(model, cache / repo_folder_name(repo_id=model, repo_type="model") / "blobs", sizes)
