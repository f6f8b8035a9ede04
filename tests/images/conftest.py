"""The images that `make images` has built."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from deploy.docker.build import REPOSITORY, ROOT, tool
from tests.images.image import Image
from tests.programs import left_out

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="session")
def image() -> Iterator[Callable[[str], Image]]:
    """Gives the image of a target."""
    builder = tool()
    if builder is None:
        left_out("neither docker nor podman nor buildah is there: apt install buildah, then make images")
        return
    if builder[0] == "buildah" and os.geteuid() != 0:
        left_out("with buildah, starting images takes root")
    with ExitStack() as stack:

        @cache
        def open_image(target: str) -> Image:
            name = f"{REPOSITORY}:{target}-{VERSION}"
            kind = ["inspect", "--type", "image"] if builder[0] == "buildah" else ["image", "inspect"]
            if subprocess.run([*builder, *kind, name], capture_output=True, check=False).returncode:
                left_out(f"there is no image {name}: make images")
            return Image(builder, name, _mounted(builder, name, stack) if builder[0] == "buildah" else None)

        yield open_image


def _mounted(builder: list[str], name: str, stack: ExitStack) -> Path:
    def buildah(*words: str) -> str:
        return subprocess.run([*builder, *words], capture_output=True, text=True, check=True).stdout.strip()

    container = buildah("from", "--pull-never", name)
    stack.callback(buildah, "rm", container)
    return Path(buildah("mount", container))
