"""`ryzanstein fetch`: downloads a model of the hub into a folder, completely or not at all."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from services.cli.errors import CommandError
from services.cli.fetch.repository import ModelReference
from services.cli.fetch.store import ModelStore


def fetch(reference: ModelReference, to: Path, name: str, endpoint: str, retries: int) -> Path:
    """Fetch the model unless it is there and complete, and return its path; raises CommandError.

    SIGTERM and SIGINT end the process at once. Otherwise Python would wait for the download threads of the hub's
    library; and the first process of a container ignores SIGTERM unless it has a handler.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    store = ModelStore(to, say)
    try:
        if store.find(reference, name) is None:
            with store.locked(reference) as alone:
                if store.find(reference, name) is None:  # another process may have fetched it meanwhile
                    # Imported here, so that a pod whose model is there need not import the hub's library.
                    from services.cli.fetch.fetching import fetch_patiently

                    fetch_patiently(reference, store, name, endpoint=endpoint, retries=retries, alone=alone, say=say)
    except OSError as error:
        raise CommandError(f"{reference.model}: {error}") from error
    return to / name


def _end(number: int, _frame: FrameType | None) -> None:
    # Not print(): the signal may have interrupted one.
    os.write(2, b"ended by a signal; what has come whole stays for the next fetch\n")
    os._exit(128 + number)


def say(text: str) -> None:
    """Print to stderr: stdout is for the path alone."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201
