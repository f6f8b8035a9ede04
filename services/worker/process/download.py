"""`python -m services.worker.process.download MODEL REVISION`: runs the hub's library in a process that can be killed.

In the server it could not be stopped: the interpreter waits at its end for the library's threads, which each
finish their file.
"""

from __future__ import annotations

import json
import sys

from services.common.lifeline import die_with_parent
from services.compute.model.loading.hub import Download, HubSettings, resolve_model
from services.compute.model.spec import ModelError


def main() -> None:
    """Print a line of JSON when the download begins, and a last one with the model's folder or the error."""
    die_with_parent()
    model, revision = sys.argv[1:]

    def begins(download: Download) -> None:
        _say(begins={"model": model, "blobs": str(download.blobs), "sizes": dict(download.sizes)})

    try:
        folder = resolve_model(model, HubSettings(revision=revision or None), begins)
    except ModelError as error:
        _say(error=str(error))
    else:
        _say(folder=str(folder))


def _say(**fields: object) -> None:
    sys.stdout.write(f"{json.dumps(fields)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
