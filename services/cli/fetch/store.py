"""A folder of models that several processes, on several machines, may fill and read at the same time.

DIR/NAME                     a link to the folder of a commit; workers open this
DIR/owner--name@COMMIT/      the files of one commit; it appears by one rename, so it is always complete
DIR/owner--name@COMMIT/.complete
DIR/owner--name--Q4_K_M@COMMIT/   the same of a GGUF model that was chosen among several
DIR/.lock-owner--name        held while the model is fetched
DIR/.tmp-owner--name@COMMIT-UUID   a download that is running, or whose process was killed
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from services.cli.errors import CommandError
from services.cli.fetch.repository import ModelReference
from services.common.durable import sync

_COMPLETE = ".complete"
_COMMIT_CHARACTERS = 12
_LOOK_S = 0.2
_SAY_EVERY_S = 10.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Complete:
    """The record `.complete`, which is written last into the folder of a commit."""

    model: str
    commit: str
    revisions: tuple[str, ...]  # requested revisions that resolved to this commit
    bytes: int
    choice: str = ""  # among several GGUF models

    @classmethod
    def read(cls, folder: Path) -> Complete | None:
        """Read the record; None for a folder that is missing or incomplete."""
        try:
            fields = json.loads((folder / _COMPLETE).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(**fields | {"revisions": tuple(fields["revisions"])})

    def write(self, folder: Path) -> None:
        """Write the record atomically."""
        temporary = folder / f"{_COMPLETE}.new-{uuid.uuid4().hex}"
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(folder / _COMPLETE)

    def is_of(self, reference: ModelReference) -> bool:
        """Whether the folder holds the requested model and revision."""
        same = (self.model, self.choice) == (reference.model, reference.choice)
        return same and reference.revision in (*self.revisions, self.commit)


class ModelStore:
    """One folder of models. `say` prints a message for the user."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._say = say
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"--to {folder}: {error.strerror}") from error

    def find(self, reference: ModelReference, name: str) -> Complete | None:
        """The record behind NAME, if it is the requested model and complete. Raises CommandError."""
        link = self.folder / name
        if link.exists() and not link.is_symlink():
            raise CommandError(f"{link} is in the way: it is not a link that fetch made")
        record = Complete.read(link)
        return record if record is not None and record.is_of(reference) else None

    @contextmanager
    def locked(self, reference: ModelReference) -> Iterator[bool]:
        """Wait for the lock of the model; yield False if the file system has no locks."""
        path = self.folder / f".lock-{reference.place}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield self._take(handle, reference)
        finally:
            os.close(handle)

    def _take(self, handle: int, reference: ModelReference) -> bool:
        said_at = -_SAY_EVERY_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() - said_at >= _SAY_EVERY_S:
                    self._say(f"{reference.model}: another process fetches it; waiting")
                    said_at = time.monotonic()
                time.sleep(_LOOK_S)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                self._say(f"{self.folder} has no locks: processes that fetch at the same time each fetch all of it")
                return False
            else:
                return True

    def commit_folder(self, reference: ModelReference, commit: str) -> Path:
        """The folder of a commit's files once they are complete."""
        return self.folder / f"{reference.place}@{commit[:_COMMIT_CHARACTERS]}"

    def staging(self, reference: ModelReference, commit: str, *, adopt: bool) -> Path:
        """A folder to download into. `adopt` resumes the download of a killed process, which needs the lock."""
        final = self.commit_folder(reference, commit).name
        path = self.folder / f".tmp-{final}-{uuid.uuid4().hex}"
        left = sorted(self.folder.glob(f".tmp-{reference.place}@*")) if adopt else []
        for old in left:
            if old.name.startswith(f".tmp-{final}-") and not path.exists():
                old.rename(path)
            else:
                shutil.rmtree(old)
        path.mkdir(exist_ok=True)
        return path

    def publish(self, staging: Path, reference: ModelReference, commit: str, size: int) -> Path:
        """Rename the folder of downloaded files, of `size` bytes, to its final name."""
        final = self.commit_folder(reference, commit)
        Complete(reference.model, commit, (reference.revision,), size, reference.choice).write(staging)
        sync(staging)
        try:
            staging.rename(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if Complete.read(final) is None:
                raise CommandError(f"{final} is in the way: it is not complete, and not ours to remove") from error
            shutil.rmtree(staging)  # without locks, another process may have published it first
        sync(self.folder)
        return final

    def name(self, reference: ModelReference, name: str, folder: Path) -> None:
        """Link NAME to a complete folder, atomically, and record the revision there."""
        record = Complete.read(folder)
        assert record is not None
        if not record.is_of(reference):
            replace(record, revisions=(*record.revisions, reference.revision)).write(folder)
        link, temporary = self.folder / name, self.folder / f".link-{uuid.uuid4().hex}"
        temporary.symlink_to(folder.name)
        temporary.replace(link)
        sync(self.folder)
