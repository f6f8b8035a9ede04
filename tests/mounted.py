"""A ConfigMap as kubelet mounts it: files are links into a folder that is swapped as a whole."""

from __future__ import annotations

import itertools
from pathlib import Path


class MountedFile:
    """One file of the mount, at `path`."""

    def __init__(self, folder: Path, text: str) -> None:
        self.path = folder / "file"
        self._folder = folder
        self._versions = itertools.count()
        self.write(text)
        self.path.symlink_to("..data/file")

    def write(self, text: str) -> None:
        """As kubelet brings a new version."""
        version = self._folder / f"..{next(self._versions)}"
        version.mkdir()
        (version / "file").write_text(text)
        link = self._folder / "..data_tmp"
        link.symlink_to(version.name)
        link.rename(self._folder / "..data")

    def remove(self) -> None:
        """As when the ConfigMap has lost the key."""
        (self._folder / "..data" / "file").unlink()
