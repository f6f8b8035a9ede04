"""`ryzanstein fetch`: brings a model of the hub into a folder, whole or not at all."""

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
    """Return the path of the model, which is there and complete; raises CommandError.

    SIGTERM and SIGINT end the process at once: the threads of the hub's library would be waited for until their files
    are there, and without a handler the first process of a container does not get SIGTERM at all.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    store = ModelStore(to, say)
    try:
        if store.find(reference, name) is None:
            with store.locked(reference) as alone:
                if store.find(reference, name) is None:  # whoever was waited for may have fetched it
                    # Imported here: a pod whose model is there already does not wait for the hub's library.
                    from services.cli.fetch.fetching import fetch_patiently

                    fetch_patiently(reference, store, name, endpoint=endpoint, retries=retries, alone=alone, say=say)
    except OSError as error:
        raise CommandError(f"{reference.model}: {error}") from error
    return to / name


def _end(number: int, _frame: FrameType | None) -> None:
    os.write(2, b"ended by a signal; what has come whole stays for the next fetch\n")  # print may be at work
    os._exit(128 + number)


def say(text: str) -> None:
    """On stderr: stdout is for the path alone."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201
