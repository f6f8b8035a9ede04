"""Generate the gRPC stubs in ``generated/ryzanstein/v1`` from ``proto/ryzanstein/v1``.

Runs as a build hook, so that ``pip install .`` always carries stubs that match the contracts, and as a
script (``python proto/build_stubs.py``) behind ``make proto``.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def build_stubs(root: Path) -> None:
    """Compile every contract under ``root/proto``; raises RuntimeError when protoc refuses one."""
    from grpc_tools import protoc

    proto, out = root / "proto", root / "generated"
    out.mkdir(exist_ok=True)
    sources = sorted(str(p.relative_to(proto)) for p in proto.rglob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={proto}",
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
    for package in (out / "ryzanstein", out / "ryzanstein" / "v1"):
        (package / "__init__.py").touch()


def _typing_plugin() -> str:
    """The program that writes the type stubs of clients and servicers; beside this interpreter, or on PATH."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    plugin = shutil.which("protoc-gen-mypy_grpc", path=places)
    if plugin is None:
        raise RuntimeError("protoc-gen-mypy_grpc is missing: pip install mypy-protobuf")
    return plugin


class StubsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling build hook: stubs exist before the wheel or the editable install is made."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate the stubs for any kind of build."""
        build_stubs(Path(self.root))


if __name__ == "__main__":
    build_stubs(Path(__file__).resolve().parent.parent)
