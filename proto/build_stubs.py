"""Generate the gRPC stubs of the contracts next to this file: ``python proto/build_stubs.py``, which is ``make proto``.

The build hooks of the servers and of the Python client run it, so that ``pip install`` always brings stubs that match.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.resources import files
from pathlib import Path

CONTRACTS = Path(__file__).resolve().parent


def build_stubs(out: Path) -> None:
    """Compile every contract into the folder `out`; raises RuntimeError when protoc refuses one."""
    from grpc_tools import protoc

    out.mkdir(exist_ok=True)
    sources = sorted(str(path.relative_to(CONTRACTS)) for path in CONTRACTS.rglob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={CONTRACTS}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            f"--plugin=protoc-gen-mypy_grpc={_typing_plugin()}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status} on {', '.join(sources)}")
    for package in (out / "ryzanstein", out / "ryzanstein" / "v1", out / "ryzanstein" / "keda"):
        (package / "__init__.py").touch()


def _typing_plugin() -> str:
    """The program that writes the type stubs of clients and servicers; next to this interpreter, or on PATH."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    plugin = shutil.which("protoc-gen-mypy_grpc", path=places)
    if plugin is None:
        raise RuntimeError("protoc-gen-mypy_grpc is missing: pip install mypy-protobuf")
    return plugin


if __name__ == "__main__":
    build_stubs(CONTRACTS.parent / "generated")
