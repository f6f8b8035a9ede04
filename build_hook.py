"""Hatchling's build hook: what is generated from `proto/` and compiled from C comes with every installation."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_STUBS = "proto/build_stubs.py"
_KERNELS = "services/compute/kernels/build.py"
_PAGING = "services/compute/kernels/paging/build.py"


class GeneratedFiles(BuildHookInterface):  # type: ignore[type-arg]
    """Stubs and kernels exist before the wheel or the editable installation is made."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """A C compiler, on a machine that has none."""
        return list(self._run(_KERNELS)["required_packages"]())

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate and compile for any kind of build."""
        self._run(_STUBS)["build_stubs"](Path(self.root) / "generated")
        kernels = self._run(_KERNELS)
        kernels["build_kernels"]()
        self._run(_PAGING)["build_paging"]()
        build_data["pure_python"] = False
        if "RYZANSTEIN_TARGET" in os.environ:  # the libraries are C, so any Python of that machine will do
            build_data["tag"] = f"py3-none-{kernels['target']().replace('-', '_')}"
        else:
            build_data["infer_tag"] = True

    def _run(self, script: str) -> dict[str, Any]:
        return runpy.run_path(str(Path(self.root) / script))
