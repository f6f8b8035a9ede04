"""The client is built from a clone and from an sdist, and a clone is the same on systems without symbolic links."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.shell import captured


def test_the_repository_has_no_links(clone: Path) -> None:
    listed = captured(["git", "ls-files", "--stage"], cwd=clone, check=True).stdout.splitlines()
    assert not [line for line in listed if line.split()[0] not in ("100644", "100755")]
    names = [line.partition("\t")[2] for line in listed]
    small = [clone / name for name in names if (clone / name).stat().st_size < 200]
    once = [path for path in small if (target := path.read_text().strip()) and (path.parent / target).exists()]
    assert not once, "texts that were symbolic links"


def built(source: Path, target: str, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, timeout=300)
    (made,) = out.iterdir()
    return made


def test_an_sdist_builds_the_same_wheel(clone: Path, tmp_path: Path) -> None:
    wheel = built(clone / "clients" / "python", "wheel", tmp_path / "wheel")
    with tarfile.open(built(clone / "clients" / "python", "sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = built(unpacked, "wheel", tmp_path / "again")
    contents = [
        {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}
        for archive in (zipfile.ZipFile(wheel), zipfile.ZipFile(again))
    ]
    assert contents[0] == contents[1]
    assert {"ryzanstein/v1/inference_pb2_grpc.py", "ryzanstein_client/py.typed"} <= contents[0].keys()
    assert {f"ryzanstein_client/{transport}/client.py" for transport in ("rest", "grpc")} <= contents[0].keys()
