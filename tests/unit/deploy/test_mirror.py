"""`deploy/images/mirror.sh` gives the copying program every image of the list, as the chart will ask for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

MIRROR = Path(__file__).resolve().parents[3] / "deploy" / "images" / "mirror.sh"


def mirror(tmp_path: Path, program: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run with a program that writes down what it is asked for."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / program).write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexit {status}\n')
    (folder / program).chmod(0o755)
    images = tmp_path / "images.txt"
    images.write_text("# a comment\nghcr.io/team/one:a-1\n\ndocker.io/two/three@sha256:abc\n")
    command = ["/bin/sh", str(MIRROR), "mirror.example:5000/x", str(images)]
    path = f"{folder}:/usr/bin:/bin"
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": path})


@pytest.mark.parametrize("program", ["skopeo", "crane"])
def test_every_image_is_copied(tmp_path: Path, program: str) -> None:
    assert mirror(tmp_path, program).returncode == 0
    commands = [line.replace("docker://", "").split()[-2:] for line in (tmp_path / "asked").read_text().splitlines()]
    assert commands == [
        ["ghcr.io/team/one:a-1", "mirror.example:5000/x/team/one:a-1"],
        ["docker.io/two/three@sha256:abc", "mirror.example:5000/x/two/three@sha256:abc"],
    ]


def test_a_failed_copy_ends_the_mirror_script(tmp_path: Path) -> None:
    assert mirror(tmp_path, "crane", status=1).returncode != 0
    assert len((tmp_path / "asked").read_text().splitlines()) == 1


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    assert "needs skopeo or crane" in mirror(tmp_path, "other").stderr
