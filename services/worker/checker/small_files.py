"""Finds the files of a model; of a hub id only the small ones, without weights."""

from __future__ import annotations

from pathlib import Path

from services.common.checkpoint_files import UNWANTED, WANTED
from services.common.gguf_files import split_choice
from services.worker.model.loading.hub import local_model
from services.worker.model.spec import ModelError

_WEIGHTS = ("*.safetensors", "*.gguf")


def find_files(model: str) -> tuple[Path, bool]:
    """Return the folder or file of a path or hub id, and whether its weights are there. Raises ModelError."""
    if (local := local_model(model)) is not None:
        return local, True
    # Imported here, because the import takes a quarter of a second, which a local folder does not need.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    repository, choice = split_choice(model)
    if choice:
        raise ModelError(f"{model}: a GGUF file of a hub has to be fetched before it is checked: ryzanstein fetch")
    try:
        folder = snapshot_download(repository, allow_patterns=[*WANTED], ignore_patterns=[*UNWANTED, *_WEIGHTS])
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelError(f"{model}: not in the local cache, and the hub is not asked or not reached") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(f"{model}: {error}") from error
    return Path(folder), False
