"""What is wrong with a file before anything can be read from it. Free of torch."""

from __future__ import annotations

from pathlib import Path

from services.worker.model.spec import ModelError

_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(file: Path) -> None:
    """Raise ModelError where git has left a pointer in the place of a large file."""
    try:
        with file.open("rb") as stream:
            found = stream.read(len(_POINTER))
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from error
    if found == _POINTER:
        raise ModelError(f"{file}: a git-lfs pointer, not the file itself; `git lfs pull` brings it")
