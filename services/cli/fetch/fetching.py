"""Fetches a missing model: lists its files, downloads them, and retries, unless an error is permanent."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

from huggingface_hub import HfApi, errors
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from services.cli.errors import CommandError
from services.cli.fetch.download import DamagedFileError, download, progress
from services.cli.fetch.repository import ModelReference, list_files
from services.cli.fetch.store import Complete, ModelStore

# The base error of the HTTP library that this version of huggingface_hub uses.
HTTPError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
_PROGRESS_S = 10.0
_FIRST_BACKOFF_S, _MOST_BACKOFF_S = 1.0, 30.0
_AGAIN = (408, 429)  # the only 4xx statuses that are retried
_HOPELESS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


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
            reason = _why_hopeless(error, reference)
            if reason or retries <= 0:
                raise CommandError(reason or f"{reference.model}: {_first_line(error)}") from error
            say(f"{reference.model}: {_first_line(error)}; trying again in {backoff:g} s")
        retries -= 1
        time.sleep(backoff)
        backoff = min(2 * backoff, _MOST_BACKOFF_S)


def _fetch(
    api: HfApi, reference: ModelReference, store: ModelStore, name: str, alone: bool, say: Callable[[str], None]
) -> None:
    listing = list_files(api, reference)
    say(
        f"{reference.model}@{reference.revision} is commit {listing.commit}: {len(listing.files)} files, "
        f"{listing.size / 1e9:.1f} GB"
    )
    folder = store.commit_folder(reference, listing.commit)
    if Complete.read(folder) is None:
        staging = store.staging(reference, listing.commit, adopt=alone)
        with progress(staging, listing, say, _PROGRESS_S):
            download(api, reference.model, listing, staging)
        folder = store.publish(staging, reference, listing.commit, listing.size)
    store.name(reference, name, folder)


def _why_hopeless(error: Exception, reference: ModelReference) -> str:
    """The message for an error that a retry cannot help; empty for others."""
    model = reference.model
    if isinstance(error, GatedRepoError):
        return f"{model}: access must be asked for on its page, and HF_TOKEN be a token that has it"
    if isinstance(error, RevisionNotFoundError):
        return f"{model}: no revision {reference.revision}"
    if isinstance(error, RepositoryNotFoundError):
        return f"{model}: no such repository, or a private one that HF_TOKEN gives no access to"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{model}: not there yet, and HF_HUB_OFFLINE forbids to ask the hub"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return f"{model}: {_first_line(error)}" if 400 <= status < 500 and status not in _AGAIN else ""
    if isinstance(error, OSError) and error.errno in _HOPELESS:
        return f"{model}: {error}"
    return ""


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
