"""Explains why a file cannot be read."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path


def reason(path: Path) -> str:
    """A message that names the file or folder that denies access, its owner, its mode, and this process's user."""
    target = Path(os.path.realpath(path))
    closed = next((place for place in (*reversed(target.parents), target) if not _opens(place, target)), target)
    status = closed.stat()
    which = "it" if closed == target else str(closed)
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    return (
        f"Permission denied: {which} belongs to {_user(status.st_uid)} with mode {mode}, read as {_user(os.geteuid())}"
    )


def _opens(place: Path, target: Path) -> bool:
    needed = os.X_OK if place.is_dir() else os.R_OK
    return os.access(place, needed | os.R_OK if place == target else needed, effective_ids=True)


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:  # in a container, users often have no entry
        return f"uid {uid}"
