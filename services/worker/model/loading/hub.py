"""Finds a model: a local folder, or a repository of the Hugging Face hub, downloaded once into its cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common.checkpoint_files import UNWANTED, WANTED
from services.worker.model.spec import ModelError


@dataclass(frozen=True, slots=True)
class HubSettings:
    """How to reach the hub; None leaves a choice to huggingface_hub and its environment variables."""

    revision: str | None = None  # branch, tag or commit
    token: str | None = None
    cache_dir: Path | None = None
    offline: bool = False


def resolve_model(model: str, settings: HubSettings = HubSettings()) -> Path:
    """Return the local folder of `model`, a path or a hub id such as "org/name". Raises ModelError."""
    local = Path(model).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(f"{model}: no such folder")
    return _download(model, settings)


def _download(model: str, settings: HubSettings) -> Path:
    # Imported here: a worker with a local folder starts a quarter of a second sooner without it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
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
