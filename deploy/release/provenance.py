"""Says what a release's files are and what they were made from: checksums, and an in-toto statement (SLSA 1)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

_KIND = "https://github.com/ryzanstein/ryzanstein/blob/main/docs/releasing.md"


def write(out: Path, root: Path, version: str) -> None:
    """Write ``SHA256SUMS`` and ``provenance.json`` for all files that lie in the folder `out`."""
    digests = {path.name: _sha256(path) for path in sorted(out.iterdir()) if path.is_file()}
    (out / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    (out / "provenance.json").write_text(json.dumps(_statement(digests, root, version), indent=1) + "\n")


def _statement(digests: dict[str, str], root: Path, version: str) -> dict[str, object]:
    revision = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "predicateType": "https://slsa.dev/provenance/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()],
        "predicate": {
            "buildDefinition": {
                "buildType": _KIND,
                "externalParameters": {"version": version},
                "internalParameters": {"changedFiles": [line[3:] for line in changed.splitlines()]},
                "resolvedDependencies": [
                    {"uri": "git+https://github.com/ryzanstein/ryzanstein", "digest": {"gitCommit": revision}}
                ],
            },
            # The workflow's own address where it runs one; by hand no service vouches for the machine.
            "runDetails": {"builder": {"id": os.environ.get("RELEASE_BUILDER", "local")}},
        },
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout.rstrip(
        "\n"
    )
