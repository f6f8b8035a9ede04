"""Fetches a missing model: lists its files, downloads them, and retries, unless an error is permanent."""

from __future__ import annotations

import time
from collections.abc import Callable

from huggingface_hub import HfApi, errors
from huggingface_hub.utils.tqdm import disable_progress_bars

from services.cli.errors import CommandError
from services.cli.fetch.download import DamagedFileError, download, progress
from services.cli.fetch.report import FolderDownload, reported
from services.cli.fetch.repository import ModelReference
from services.cli.fetch.store import Complete, ModelStore
from services.common.hub import first_line, list_files, why_hopeless

# The base error of the HTTP library that this version of huggingface_hub uses.
HTTPError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
_PROGRESS_S = 10.0
_FIRST_BACKOFF_S, _MOST_BACKOFF_S = 1.0, 30.0


def fetch_patiently(
    reference: ModelReference,
    store: ModelStore,
    name: str,
    *,
    endpoint: str,
    retries: int,
    alone: bool,
    say: Callable[[str], None],
) -> None:
    """Fetch the model and link `name` to it. `alone`: this process holds the lock. Raises CommandError."""
    disable_progress_bars()
    api = HfApi(endpoint=endpoint or None)
    backoff = _FIRST_BACKOFF_S
    while True:
        try:
            return _fetch(api, reference, store, name, alone, say)
        except (HTTPError, OSError, DamagedFileError) as error:
            reason = why_hopeless(error, reference.model, reference.revision)
            if reason or retries <= 0:
                raise CommandError(reason or f"{reference.model}: {first_line(error)}") from error
            say(f"{reference.model}: {first_line(error)}; trying again in {backoff:g} s")
        retries -= 1
        time.sleep(backoff)
        backoff = min(2 * backoff, _MOST_BACKOFF_S)


def _fetch(
    api: HfApi, reference: ModelReference, store: ModelStore, name: str, alone: bool, say: Callable[[str], None]
) -> None:
    try:
        listing = list_files(api, reference.model, reference.revision, reference.choice)
    except ValueError as error:
        raise CommandError(str(error)) from error
    say(
        f"{reference.model}@{reference.revision} is commit {listing.commit}: {len(listing.files)} files, "
        f"{listing.size / 1e9:.1f} GB"
    )
    folder = store.commit_folder(reference, listing.commit)
    if Complete.read(folder) is None:
        staging = store.staging(reference, listing.commit, adopt=alone)
        with progress(staging, listing, say, _PROGRESS_S), reported(FolderDownload(staging, listing.size)):
            download(api, reference.model, listing, staging)
        folder = store.publish(staging, reference, listing.commit, listing.size)
    store.name(reference, name, folder)
